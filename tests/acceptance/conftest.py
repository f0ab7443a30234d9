"""What holds for every acceptance test: each line of its logs is as docs/jsonl.schema.json says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

SCHEMA = Path(__file__).parents[2] / "docs" / "jsonl.schema.json"


@cache
def validator(event: str) -> Draft202012Validator:
    """For the lines of one event; asking for all of them at once is slow."""
    schema: dict[str, Any] = json.loads(SCHEMA.read_text())
    assert {"$ref": f"#/$defs/{event}"} in schema.pop("oneOf"), f"{event} is not in the schema"
    return Draft202012Validator({**schema, "$ref": f"#/$defs/{event}"})


@pytest.fixture(autouse=True)
def _logs_keep_to_the_schema(tmp_path: Path) -> Iterator[None]:
    yield
    for log in tmp_path.rglob("backup-remote.jsonl*"):
        for text in log.read_text().splitlines():
            if text:
                line = json.loads(text)
                validator(line["event"]).validate(line)
