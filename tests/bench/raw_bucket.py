"""One file to a bucket and back by boto3 alone, in parts: what the store carries at best.

Start it as `python -m tests.bench.raw_bucket put|get FILE ENDPOINT BUCKET`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_PART: Final = 32 * 1024**2
_IN_FLIGHT: Final = 3


def client(endpoint: str) -> S3Client:
    """Makes a client that hashes nothing by itself."""
    config = Config(
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", "us-east-1", endpoint_url=endpoint, config=config)


def main() -> None:
    """Sends the file, or receives it."""
    way, file, endpoint, bucket = sys.argv[1:]
    parts = TransferConfig(
        multipart_threshold=_PART, multipart_chunksize=_PART, max_concurrency=_IN_FLIGHT
    )
    if way == "put":
        client(endpoint).upload_file(file, bucket, "raw", Config=parts)
    else:
        client(endpoint).download_file(bucket, "raw", file, Config=parts)


if __name__ == "__main__":
    main()
