"""What this link, this store and this machine really give: `ntt-backup-remote bench`.

The obvious benchmark is a big file of zeros through `ssh -C`, once. It measures a compressor: zeros
shrink a thousandfold, so the figure has nothing to do with the link, and every share of it that is
worked out later is wrong as well. One run more and the machine is busy with something else; and
`tar | ssh tar` has ended when the last byte is in a buffer, not when it has arrived.

So here: content that does not compress, or the user's own blobs; the clock stops when the far side
has said that it has read or stored all; several rounds, with everything that is compared in each of
them, so that a busy minute falls on all alike; every figure a median with the least and the
greatest beside it. Nothing is marked in the catalog, and the remote has nothing more when it ends.

`link`, `strategies` and `scenarios` measure. They hand tasks (`tasks`) to helper processes (`crew`,
`helper`), which talk to the remote (`streaming`, `sending`). What follows from the figures is pure:
`results`, `sample`, `ways`, `verdict`, `table`, `plot`.
"""
