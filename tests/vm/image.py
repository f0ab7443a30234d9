"""What guests boot: the root with our package, the kernel, and a small initrd; made once."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final

from tests.helpers.parallel import in_turn

CHECKOUT: Final = Path(__file__).parents[2]
FILE_SYSTEMS: Final = ("ext4", "xfs", "btrfs")
PYTHON: Final = "/usr/lib/ntt-backup/bin/python"
# KVM may be there and not run a kernel such as Debian's. Its last words say what runs.
QEMU: Final = (
    *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none"),
    *("-machine", "pc", "-accel", "kvm", "-cpu", "host"),
)

_PACKAGES: Final = (
    *("systemd-sysv", "udev", "kmod", "iproute2", "procps", "busybox-static", "logrotate"),
    *("openssh-server", "openssh-client", "postgresql", "python3", "linux-image-cloud-amd64"),
    *("e2fsprogs", "xfsprogs", "btrfs-progs", "passwd"),
)
_MODULES: Final = ("virtio_pci", "virtio_blk", "virtio_net", "ext4")
_UML_MODULES: Final = Path("/usr/lib/uml/modules")
# What has to survive; the rest of the root is fresh at each boot.
_KEPT: Final = (
    *("/var/lib/postgresql", "/var/lib/ntt-backup", "/var/log/ntt", "/etc/ntt"),
    *("/srv/store", "/srv/backup", "/home"),
)
_TRIAL_SECONDS: Final = 60
# Nothing that the program needs: a guest boots in half the time without it.
_MASKED: Final = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer"),
    *("e2scrub_reap.service", "fstrim.timer", "logrotate.timer", "getty@tty1.service"),
    *("serial-getty@ttyS0.service", "systemd-update-utmp.service", "systemd-timesyncd.service"),
    *("systemd-udevd.service", "systemd-udevd-control.socket", "systemd-udevd-kernel.socket"),
    *("systemd-udev-trigger.service", "systemd-random-seed.service", "systemd-logind.service"),
    *("kmod-static-nodes.service", "systemd-modules-load.service", "systemd-binfmt.service"),
    *("systemd-journal-flush.service", "dev-hugepages.mount", "dev-mqueue.mount"),
    *("sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-kernel-config.mount"),
    *("systemd-update-utmp-runlevel.service", "getty.target"),
    *("modprobe@.service", "systemd-remount-fs.service", "systemd-pstore.service"),
)
# vm.mkfs: the disk is made anew, and gets what the root has at the places that are kept. vm.try:
# that this runs is all that is wanted.
_INIT: Final = """\
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for word in $(cat /proc/cmdline); do
    case $word in
        vm.try) poweroff -f ;;
        vm.*=*) eval "vm_${word#vm.}" ;;
    esac
done
# A kernel that is a process has the rest built in.
[ $vm_root = vda ] || echo /virtio_blk.ko >/modules
while read -r module; do insmod $module; done </modules
ip link set lo up
ip link set eth0 up
ip addr add "$vm_address/24" dev eth0
until [ -b /dev/$vm_root ] && [ -b /dev/$vm_data ]; do sleep 0.1; done
# Else the guest would not flush a disk whose server does not say that it has a cache.
echo "write back" >/sys/block/$vm_data/cache_type
mount -t ext4 -o noinit_itable /dev/$vm_root /root
for place in dev proc sys; do mount --move /$place /root/$place; done
kept=$(cat /kept)
# By their paths, or busybox would take its own.
[ $vm_root = ubda ] || chroot /root /sbin/modprobe $vm_fs
if [ "$vm_mkfs" ]; then
    case $vm_fs in ext4) force=-F ;; *) force=-f ;; esac
    chroot /root /sbin/mkfs.$vm_fs -q $force /dev/$vm_data
fi
mount -t $vm_fs -o noatime /root/dev/$vm_data /root/data
[ -z "$vm_mkfs" ] || chroot /root /bin/cp -a --parents $kept /data
for place in $kept; do mount --bind /root/data$place /root$place; done
exec switch_root /root /sbin/init
"""


@dataclass(frozen=True)
class Image:
    """What a guest boots. directory: with all its files."""

    directory: Path

    @property
    def root(self) -> Path:
        return self.directory / "root.img"

    @property
    def kvm(self) -> bool:
        """Whether qemu runs it on KVM; else its kernel is a process."""
        return (self.directory / "kvm").exists()

    @property
    def initrd(self) -> Path:
        return self.directory / "initrd"

    @property
    def kernel(self) -> list[str]:
        """The arguments for qemu that say what it boots."""
        return ["-kernel", str(self.directory / "vmlinuz"), "-initrd", str(self.initrd)]

    @property
    def key(self) -> Path:
        """The secret key of root in each guest."""
        return self.directory / "key"

    @property
    def host_key(self) -> str:
        """The public key of each guest's sshd."""
        return (self.directory / "host_key.pub").read_text().strip()


def lacking() -> str:
    """What guests need and this machine does not have, "" where nothing is missing."""
    if os.geteuid() != 0 or platform.machine() != "x86_64":
        return "only root can make the image, for x86-64"
    programs = "linux.uml bwrap qemu-storage-daemon mmdebstrap mkfs.ext4 ssh ip dpkg-deb"
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [one for one in programs.split() if shutil.which(one, path=path) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def call(*argv: str | Path, stdin: bytes = b"", **environ: str) -> str:
    """Run a program to its end, which must be good; what it wrote."""
    done = subprocess.run(
        [*map(str, argv)],
        input=stdin,
        capture_output=True,
        timeout=3600,
        env={**os.environ, **environ},
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace")[-3000:]
        raise RuntimeError(f"{argv}: {done.returncode} {said}")
    return done.stdout.decode(errors="replace")


def image(work: Path, more: Sequence[str] = (), components: str = "main") -> Image:
    """The image for this checkout, made where it is not there yet.

    Args:
        work: Where images are kept: some 3 GB.
        more: More packages of Debian.
        components: Those of Debian that they are in.
    """
    work.mkdir(parents=True, exist_ok=True)
    packages = [*_PACKAGES, *more]
    base = work / f"base-{_digest([*packages, components])}"
    package = work / f"package-{_digest(_contents('ntt_backup', 'systemd', 'bin'))}"
    words = (base.name, package.name, *_contents("tests/vm/image.py"))
    top = work / f"image-{_digest(words)}"
    with in_turn(Path(__file__)):
        _make(base, partial(_debootstrap, packages, components))
        _make(package, lambda part: call(CHECKOUT / "bin/build-deb", part))
        _make(top, partial(_install, base, package))
    return Image(top)


def _make(place: Path, fill: Callable[[Path], object]) -> None:
    """Make a directory, if it is not there; it has its name once it is complete."""
    if not place.exists():
        part = place.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        fill(part)
        part.rename(place)


def _runs_on_kvm(image: Image) -> bool:
    argv = [*QEMU, *image.kernel, "-append", "vm.try quiet"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(argv, capture_output=True, timeout=_TRIAL_SECONDS, check=False)
        return done.returncode == 0
    return False


def _digest(words: Iterable[str]) -> str:
    return sha256("\0".join(words).encode()).hexdigest()[:12]


def _contents(*names: str) -> Iterable[str]:
    """What files of the checkout hold."""
    for name in names:
        place = CHECKOUT / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and path.suffix != ".pyc":
                yield f"{path.relative_to(CHECKOUT)} {sha256(path.read_bytes()).hexdigest()}"


def _debootstrap(packages: Iterable[str], components: str, part: Path) -> None:
    release = Path("/etc/os-release").read_text().partition("VERSION_CODENAME=")[2].split()[0]
    # Where mmdebstrap is killed, its mounts end with it. Else this machine's /dev/shm, which is one
    # of them, would be emptied when the part that is left is removed.
    call(
        *("unshare", "--mount", "mmdebstrap", "--quiet", "--mode=root", "--variant=minbase"),
        *("--dpkgopt=force-unsafe-io", f"--components={components}"),
        *(f"--include={','.join(packages)}", release, part),
        LC_ALL="C.UTF-8",
    )


def _install(base: Path, package: Path, top: Path) -> None:
    """Make the root of the guests, with our package, and what boots it."""
    root = top / "root"
    top.mkdir()
    call("cp", "-a", "--reflink=auto", base, root)
    shutil.copy(next(package.glob("*.deb")), root / "package.deb")
    call("chroot", root, "dpkg", "--install", "/package.deb", PATH="/usr/sbin:/usr/bin:/sbin:/bin")
    (root / "package.deb").unlink()
    _configure(root)
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", top / "key")
    _write(root / "root/.ssh/authorized_keys", (top / "key.pub").read_text())
    shutil.copy(root / "etc/ssh/ssh_host_ed25519_key.pub", top / "host_key.pub")
    kernel = next((root / "boot").glob("vmlinuz-*"))
    shutil.copy(kernel, top / "vmlinuz")
    _initrd(root, kernel.name.partition("-")[2], top)
    size = int(call("du", "-sxm", root).split()[0]) * 5 // 4 + 200
    call("mkfs.ext4", "-q", "-O", "^has_journal", "-d", root, top / "root.img", f"{size}M")
    shutil.rmtree(root)
    if _runs_on_kvm(Image(top)):
        _write(top / "kvm", "")


def _configure(root: Path) -> None:
    """A machine that has all but our settings."""
    _write(root / "etc/machine-id", f"{'ab' * 16}\n")
    (root / "etc/fstab").unlink(missing_ok=True)  # The initrd mounts.
    _write(root / "etc/hosts", "127.0.0.1 localhost\n192.0.2.1 source\n192.0.2.2 remote\n")
    _write(root / "etc/ssh/sshd_config.d/vm.conf", "UseDNS no\nMaxStartups 200\n")
    units = root / "etc/systemd/system"
    # A guest on a busy machine takes minutes for what Python does at the start.
    drop_in = "[Unit]\nRequiresMountsFor=/srv/store\n[Service]\nTimeoutStartSec=30min\n"
    _write(units / "ntt-backup-remote.service.d/store.conf", drop_in)
    wanted = units / "multi-user.target.wants/ntt-backup-remote.service"
    wanted.symlink_to("/lib/systemd/system/ntt-backup-remote.service")
    for name in _MASKED:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    for conf in root.glob("etc/postgresql/*/main/postgresql.conf"):
        more = "shared_buffers = 32MB\nmax_wal_size = 64MB\nmin_wal_size = 32MB\n"
        _write(conf, conf.read_text() + more)
    call("chroot", root, "useradd", "--create-home", "--shell", "/bin/sh", "vault")
    for place in ("data", *_KEPT):
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    call("chroot", root, "chown", "vault:", "/srv/backup")
    for name in (
        "etc/.updated",
        "var/.updated",
    ):  # Else each boot would do what follows an upgrade.
        (root / name).touch()


def _initrd(root: Path, release: str, top: Path) -> None:
    """An initrd with busybox and the modules that find the root and the network."""
    place = top / "initrd.d"
    modules: list[str] = []
    for name in _MODULES:
        said = call("chroot", root, "modprobe", "-S", release, "--show-depends", name)
        modules += [line.split()[1] for line in said.splitlines() if line.startswith("insmod ")]
    modules = list(dict.fromkeys(modules))
    for name in ("bin", "proc", "sys", "dev", "root"):
        (place / name).mkdir(parents=True)
    for name in ("bin/busybox", *modules):
        (place / name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name.lstrip("/"), place / name.lstrip("/"))
    _write(place / "modules", "".join(f"{name}\n" for name in modules))
    shutil.copy(next(_UML_MODULES.glob("*/kernel/drivers/block/virtio_blk.ko")), place)
    _write(place / "kept", " ".join(_KEPT))
    _write(place / "init", _INIT)
    (place / "init").chmod(0o755)
    pack = f"cd {place} && find . | ./bin/busybox cpio -o -H newc >{top}/initrd"
    call("sh", "-ec", pack)
    shutil.rmtree(place)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
