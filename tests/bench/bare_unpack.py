"""The least that a Python program does to unpack a tree: the floor beside `restore` and tar.

It makes directories, opens, writes and dates each file, and closes many at once. It compares
nothing, parses nothing but a ready list, and trusts every name. Only `os`, `mmap` and `marshal` are
loaded: `python -I -S bare_unpack.py LIST ARCHIVE DIRECTORY`.
"""

import marshal
import mmap
import os
import sys

_AT_ONCE = 250
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_list(path: str, archive: str) -> None:
    """Writes the list for an archive of GNU tar: (directory, [(name, offset, size), ...]), ..."""
    import tarfile  # The program itself loads as little as it can.

    directories: dict[str, list[tuple[str, int, int]]] = {}
    with tarfile.open(archive) as members:
        for member in members:
            if member.isfile():
                directory, name = os.path.split(member.name)
                place = (name, member.offset_data, member.size)
                directories.setdefault(directory, []).append(place)
    with open(path, "wb") as file:
        marshal.dump(list(directories.items()), file)


def unpack(path: str, archive: str, to: str) -> None:
    """Unpacks the archive with that list into a directory."""
    with open(path, "rb") as file:
        directories = marshal.load(file)
    with open(archive, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    date = (0, 0)
    for directory, files in directories:
        place = f"{to}/{directory}"
        try:
            os.mkdir(place)
        except FileNotFoundError:
            os.makedirs(place)
        except FileExistsError:
            pass
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        for count, (name, offset, size) in enumerate(files, 1):
            new = os.open(name, _NEW, 0o644, dir_fd=fd)
            os.write(new, content[offset : offset + size])
            os.utime(new, ns=date)
            if count % _AT_ONCE == 0:
                os.closerange(fd + 1, new + 1)
        os.closerange(fd, fd + 1 + _AT_ONCE)


if __name__ == "__main__":
    unpack(*sys.argv[1:])
