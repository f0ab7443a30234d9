"""Virtual machines: a source and a remote whose power is cut, or which have other faults.

Two Debian guests have a real systemd, the Debian package of this checkout and its unit. `source`
has PostgreSQL, the store, and the daemon; `remote` has an sshd whose key can only back up. Where
KVM runs Debian's kernel, a guest is qemu with that kernel; else it is User Mode Linux, a kernel
that is a process. What must survive lies on a disk of its own:

    ext4 | xfs | btrfs -> virtio -> qemu -> powerdisk (FUSE) -> image, and log of writes and flushes

This machine keeps nothing of the disk in memory: powerdisk's file has no page cache, so each write
of a guest is in the log before it ends, and so is each flush. Each era begins with a proof: what a
guest has synced must be in the log, and a flush after it. (That proof failed with ubd, the disk of
User Mode Linux itself, which forgets flushes: so qemu-storage-daemon serves that disk.)

The root of each guest is the same image, and is fresh at each boot. A power cut is SIGKILL for the
machine. Then the disk gets what was flushed, and of the writes after the last flush a part, in any
order (`tests.power.crashes`). The guest boots from that, and the unit starts by itself. The network
is a namespace with a bridge, from which the guests are also spoken to.

    apt-get install user-mode-linux bubblewrap qemu-system-common mmdebstrap gcc pkg-config
    apt-get install libfuse3-dev fuse3 dpkg-dev        # and qemu-system-x86, where there is KVM
    python -m tests.vm --rounds 200 --seed 1           # as root; makes the image first
    python -m tests.vm --rounds 10 --seed 1 --lying    # disks that ignore flushes: must be found
    python -m tests.vm --rounds 20 --seed 1 --faults all              # each kind of fault in turns

An application in the source stores blobs all the time, each with a sync and a row, and tells the
model outside which rows are committed and which are marked as copied. So the model knows what was
said before a fault. Each round of the campaign strikes one guest or both:

| fault | how |
|---|---|
| power | the power is cut: at work, while the guest boots, or while it recovers |
| reboot | the guest shuts down by itself, and boots; what was not flushed may be lost |
| frozen | the guest does nothing for 20 to 90 s: SIGSTOP of its kernel alone, or of qemu |
| full | the disk has no room for 10 to 60 s; then PostgreSQL is started again if it has ended |
| clock | the clock is 1 to 40 hours ahead or behind, blobs are copied, and it is set right again |

Once the guests are up and a new blob has been copied, the model checks:

- The unit is active, by itself, and was not restarted since the boot. After a full disk systemd may
  have restarted it: the daemon ends with status 6 where the remote has no room.
- Every blob that was ever said to be copied, and every one that is marked, is on the remote byte
  for byte; nothing that had a final name is gone, unless the remote's power was cut before the
  receipt.
- Whatever has a final name is whole: plain blobs, packs (read by `tests.faults.plain_packs`), and
  dumps with their records. The ledger's packs are those of the remote.
- Every committed row and its file are there, and no blob is marked as failed.

After some rounds the application stops; everything must become copied, `verify` must end with 0,
`pg_restore` must read the dumps, and the log must match its schema. Then both disks begin anew,
with another file system and layout.

| module | what it does |
|---|---|
| `image.py` | the package, the root of the guests, kernel and initrd; kept below `--work` |
| `guest.py` | a machine: start, power cut, commands |
| `pair.py` | source and remote, their set-up, what is on them |
| `application.py` | runs in the source |
| `faults.py` | faults without a boot |
| `campaign.py`, `__main__.py` | the rounds, and the model |
| `test_vm.py` | the model, by itself |
"""
