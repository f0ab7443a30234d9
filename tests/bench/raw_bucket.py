"""One file to a bucket and back by boto3 alone, in parts: what the store carries at best.

Start it as `python -m tests.bench.raw_bucket put|get FILE ENDPOINT BUCKET`.
"""

from __future__ import annotations

import sys
from typing import Final

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

_PART: Final = 32 * 1024**2
_IN_FLIGHT: Final = 3


def main() -> None:
    """Sends the file, or receives it."""
    way, file, endpoint, bucket = sys.argv[1:]
    config = Config(
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    client = boto3.client("s3", "us-east-1", endpoint_url=endpoint, config=config)
    parts = TransferConfig(
        multipart_threshold=_PART, multipart_chunksize=_PART, max_concurrency=_IN_FLIGHT
    )
    if way == "put":
        client.upload_file(file, bucket, "raw", Config=parts)
    else:
        client.download_file(bucket, "raw", file, Config=parts)


if __name__ == "__main__":
    main()
