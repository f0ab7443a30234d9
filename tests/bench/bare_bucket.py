"""The least that Python does to bring blobs to a bucket, and back: the floor beside ours.

Each process reads and hashes the files of its directories into parts of 32 MiB, sends these with
their SHA-256 as one object, and a table of them as another; one UPDATE marks its blobs. The way
back fetches ranges of such an object, and hashes and writes each file. There is no preflight and no
claim, nothing is compressed, synced or named later, and no answer is looked at.
`python -m tests.bench.bare_bucket put|get DIRECTORY ENDPOINT BUCKET PROCESSES CATALOG`.
"""

import base64
import json
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from mmap import mmap
from typing import Any

import psycopg
from blake3 import blake3

from ntt_backup.objects.s3_bucket import Body
from tests.bench.raw_bucket import client as made_client

_PART = 32 << 20
_RANGE = 16 << 20
_PIECE = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def put(client: Any, number: int, of: int, store: str, bucket: str, catalog: str) -> None:
    """Sends the files of every directory whose turn it is as one object."""
    where = {"Bucket": bucket, "Key": f"bare-{number}"}
    to = {**where, "UploadId": client.create_multipart_upload(**where)["UploadId"]}

    def send(part: int, data: memoryview) -> dict[str, object]:
        found = base64.b64encode(sha256(data).digest()).decode()
        body = Body(data, None)
        answer = client.upload_part(**to, PartNumber=part, Body=body, ChecksumSHA256=found)
        return {"PartNumber": part, "ETag": answer["ETag"], "ChecksumSHA256": found}

    buffers = [memoryview(mmap(-1, _PART)) for _ in range(2)]
    parts: list[Future[dict[str, object]]] = []
    table: list[tuple[str, int]] = []
    at, space = 0, buffers[0]
    with ThreadPoolExecutor(2) as threads:
        for above in sorted(os.listdir(store))[number::of]:
            for below in sorted(os.listdir(f"{store}/{above}")):
                place = os.open(f"{store}/{above}/{below}", os.O_RDONLY | os.O_DIRECTORY)
                for name in os.listdir(place):
                    file, found, size, more = os.open(name, 0, dir_fd=place), blake3(), 0, True
                    while more:
                        room = space[at : at + _PIECE]
                        count = os.readv(file, [room])
                        found.update(room[:count])
                        at, size, more = at + count, size + count, count == len(room)
                        if at == _PART:
                            parts.append(threads.submit(send, len(parts) + 1, space))
                            at, space = 0, buffers[len(parts) % 2]
                            if len(parts) > 1:
                                parts[-2].result()
                    os.close(file)
                    _prove(name, found)
                    table.append((name, size))
                os.close(place)
        parts.append(threads.submit(send, len(parts) + 1, space[:at]))
        whole = {"Parts": [part.result() for part in parts]}
    client.complete_multipart_upload(**to, MultipartUpload=whole)
    client.put_object(Bucket=bucket, Key=f"table-{number}", Body=json.dumps(table).encode())
    with psycopg.connect(catalog) as conn:
        mark = "update blobs set remote_copied = true where blobid = any(%s)"
        conn.execute(mark, ["{" + ",".join(name for name, _ in table) + "}"])


def get(client: Any, number: int, _of: int, to: str, bucket: str, _catalog: str) -> None:
    """Writes the files of one object."""
    table = client.get_object(Bucket=bucket, Key=f"table-{number}")["Body"].read()
    content, at, held, above, place = memoryview(b""), 0, 0, "", -1
    for name, size in json.loads(table):
        if name[:4] != above:
            above = name[:4]
            os.makedirs(f"{to}/{name[:2]}/{name[2:4]}")
            place = os.open(f"{to}/{name[:2]}/{name[2:4]}", os.O_RDONLY | os.O_DIRECTORY)
        file, found, left = os.open(name, _NEW, 0o644, dir_fd=place), blake3(), size
        while left:
            if at == len(content):
                wanted = f"bytes={held}-{held + _RANGE - 1}"
                answer = client.get_object(Bucket=bucket, Key=f"bare-{number}", Range=wanted)
                content, at = memoryview(answer["Body"].read()), 0
                held += len(content)
            piece = content[at : at + left]
            found.update(piece)
            os.write(file, piece)
            at, left = at + len(piece), left - len(piece)
        os.close(file)
        _prove(name, found)


def _prove(name: str, found: blake3) -> None:
    if name != found.hexdigest():
        sys.exit(f"{name} is {found.hexdigest()}")


def main() -> None:
    """Does one of the ways in several processes."""
    way, directory, endpoint, bucket, processes, catalog = sys.argv[1:]
    ready, of, pids = made_client(endpoint), int(processes), []
    for number in range(of):
        if not (pid := os.fork()):
            (put if way == "put" else get)(ready, number, of, directory, bucket, catalog)
            os._exit(0)
        pids.append(pid)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        sys.exit("a part is missing")


if __name__ == "__main__":
    main()
