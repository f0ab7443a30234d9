"""Makes docs/jsonl.schema.json; `python -m tests.helpers.jsonl_schema` writes it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import ntt_backup.daemon.events
import ntt_backup.dump.events
import ntt_backup.snapshot.events  # noqa: F401 - their classes are events, too
from ntt_backup.events import Event, WorkerEvent
from ntt_backup.process.messages import kinds

_MODULES = tuple(f"ntt_backup.{one}events" for one in ("", "daemon.", "dump.", "snapshot."))
FILE = Path(__file__).parents[2] / "docs" / "jsonl.schema.json"
COMMON = {
    "timestamp": {
        "type": "string",
        "description": "RFC 3339, UTC",
        "pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?Z$",
    },
    "run_id": {
        "type": "string",
        "format": "uuid",
        "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
    },
    "target": {"type": "string", "description": "the name of the target"},
    "host": {"type": "string"},
}


def schema() -> dict[str, Any]:
    """The schema of a line: one of all events."""
    known = [one for one in kinds(Event) if issubclass(one, Event)]
    # Whatever order the modules were imported in.
    known.sort(key=lambda one: _MODULES.index(one.__module__))
    events = {one.kind: _event(one) for one in known}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of the JSONL log of ntt-backup-remote",
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in events],
        "$defs": {**COMMON, **events},
    }


def _event(event: type[Event]) -> dict[str, Any]:
    made = TypeAdapter(event).json_schema()
    fields = {name: _field(**field) for name, field in made["properties"].items()}
    common = {name: {"$ref": f"#/$defs/{name}"} for name in COMMON}
    properties = {
        "timestamp": common.pop("timestamp"),
        "level": {"const": event.level},
        "event": {"const": event.kind},
        **common,
        **fields,
    }
    required = list(properties)
    if "target" not in fields:
        required.remove("target")  # Older lines lack it.
    if issubclass(event, WorkerEvent) and not event.always:
        required.remove("worker")
    return {
        "description": " ".join((inspect.getdoc(event) or "").split()),
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _field(*, title: str, default: object = ..., **made: Any) -> dict[str, Any]:
    """A field as pydantic has it, but `int | None` as one type; `worker` is left out, not null."""
    if "anyOf" in made:
        value, null = made.pop("anyOf")
        types = [value["type"], null["type"]]
        made |= {**value, "type": types if default is ... else types[0]}
    return made


def text() -> str:
    """The whole file."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
