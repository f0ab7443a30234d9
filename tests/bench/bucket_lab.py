"""A SeaweedFS at the end of a link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from tests.bench.lab import SHAPES, Lab, delayed
from tests.helpers.s3_servers import S3Server, seaweedfs
from tests.helpers.sshd import HOST


@contextmanager
def bucket_lab(link: Lab) -> Iterator[S3Server]:
    """Gives a server whose endpoint is behind the link, with its delay."""
    with ExitStack() as stack:
        server = stack.enter_context(seaweedfs(link.address, link.inside))
        if shape := SHAPES[link.link]:
            to = server.endpoint.removeprefix("http://")
            port, _ = stack.enter_context(delayed(to, shape, link.home))
            server = replace(server, endpoint=f"http://{HOST}:{port}")
        yield server
