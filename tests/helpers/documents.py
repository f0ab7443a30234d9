"""Makes parts of docs/ from the code; `python -m tests.helpers.documents` writes them.

They are the schema of the JSONL log, from the events; the schema of `status --json`, from the
classes that it prints; and the table of metrics.
"""

from __future__ import annotations

import inspect
import json
from datetime import datetime
from itertools import dropwhile
from pathlib import Path
from typing import Any

from prometheus_client import Histogram
from pydantic import TypeAdapter

import ntt_backup.daemon.events
import ntt_backup.dump.events
import ntt_backup.snapshot.events  # noqa: F401 - their classes are events, too
from ntt_backup.audit.object_locks import TargetLock
from ntt_backup.catalog.history import DumpRun, Run
from ntt_backup.catalog.identities import Place
from ntt_backup.catalog.listed_files import Files
from ntt_backup.catalog.proofs import COPY_STATES, Unproved
from ntt_backup.catalog.stats import StoredObjects, Totals
from ntt_backup.daemon.control_socket import DaemonReport
from ntt_backup.events import Event, WorkerEvent
from ntt_backup.process.messages import kinds
from ntt_backup.report.health import Health
from ntt_backup.report.metrics import METRICS, PREFIX, class_of
from ntt_backup.rollback_detection import Newest
from ntt_backup.snapshot.last_take import Last

DOCS = Path(__file__).parents[2] / "docs"
EVENTS = DOCS / "jsonl.schema.json"
STATUS = DOCS / "status.schema.json"
MONITORING = DOCS / "monitoring.md"
_MODULES = tuple(f"ntt_backup.{one}events" for one in ("", "daemon.", "dump.", "snapshot."))
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


def events_schema() -> dict[str, Any]:
    """Returns the schema of a line of the JSONL log: one of all events."""
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


def events_text() -> str:
    """Returns what is to be in EVENTS."""
    return json.dumps(events_schema(), indent=2) + "\n"


_NAMES = "#/$defs/{model}"


def status_schema() -> dict[str, Any]:
    """Returns the schema of the object that `status --json` prints for one target."""
    classes: tuple[type, ...] = (
        Totals,
        Place,
        Unproved,
        Files,
        StoredObjects,
        Run,
        DumpRun,
        Last,
        Newest,
        TargetLock,
        DaemonReport,
    )
    defs: dict[str, Any] = {}
    for one in classes:
        made = TypeAdapter(one).json_schema(ref_template=_NAMES, mode="serialization")
        defs |= made.pop("$defs", {})
        defs[one.__name__] = made
    for name, made in defs.items():
        made["description"] = " ".join(made.get("description", name).split())
        made["required"] = list(made["properties"])
        made["additionalProperties"] = False
    text, count, number = {"type": "string"}, {"type": "integer"}, {"type": "number"}
    state = {**text, "enum": list(COPY_STATES)}
    moment = TypeAdapter(datetime).json_schema()
    totals = defs.pop("Totals")
    level = {"type": "string", "enum": [one.name.lower() for one in Health]}
    snapshot = defs.pop("Last")
    run = defs["Run"]
    under_way = {**run, "properties": {**run["properties"], "mb_per_s": {"type": "number"}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What `status --json` prints for one target",
        "description": totals["description"],
        **_object(
            target=text,
            url=_or_null(text),
            health=_object(
                level=level,
                safety=text,
                points=_list(_object(level=level, what=text, do=text)),
            ),
            identity=_or_null(_ref("Place")),
            **totals["properties"],
            prefixes=text,
            unproved=_or_null(_ref("Unproved")),
            policy=_or_null(
                _object(
                    copies={"type": ["integer", "null"]},
                    proved_s=number,
                    counted_at=moment,
                    blobs=count,
                    short=count,
                    by_proofs=_list(count),
                    targets=_each(_object(**dict.fromkeys(COPY_STATES, count))),
                    kinds=_list(_object(blobs=count, first=text, targets=_each(state))),
                )
            ),
            files=_or_null(_ref("Files")),
            objects=_or_null(_ref("StoredObjects")),
            last_run=_or_null(_ref("Run")),
            under_way=_list(under_way),
            dumps=_list(_ref("DumpRun")),
            snapshots=_list(
                _object(
                    set=text,
                    **snapshot["properties"],
                    next_due=_or_null(moment),
                )
            ),
            missed=_list(_ref("Newest")),
            lock=_or_null(_ref("TargetLock")),
            ranges=_list(_object(range=text, holder=text, pid=count)),
            daemon=_or_null(_ref("DaemonReport")),
        ),
        "$defs": defs,
    }


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _NAMES.format(model=name)}


def _or_null(one: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [one, {"type": "null"}]}


def _list(one: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": one}


def _each(one: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": one}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _untitled(made: Any, *, top: bool = True) -> Any:
    """The same without pydantic's titles, which only say the names of the fields again."""
    if isinstance(made, list):
        return [_untitled(one, top=False) for one in made]
    if not isinstance(made, dict):
        return made
    kept = {key: one for key, one in made.items() if top or key != "title" or isinstance(one, dict)}
    return {key: _untitled(one, top=False) for key, one in kept.items()}


def status_text() -> str:
    """Returns what is to be in STATUS."""
    return json.dumps(_untitled(status_schema()), indent=2) + "\n"


_BEGIN = "| metric | labels | what it says |\n|---|---|---|\n"


def _table() -> str:
    return "".join(
        f"| `{PREFIX}{name}` | {', '.join(one.labels)} | {_sentence(name, one.text)} |\n"
        for name, one in METRICS.items()
    )


def _sentence(name: str, text: str) -> str:
    return f"{text} A histogram." if class_of(name) is Histogram else text


def monitoring_text() -> str:
    """Returns MONITORING with the table as it is to be."""
    before, begin, rest = MONITORING.read_text().partition(_BEGIN)
    after = dropwhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True))
    return before + begin + _table() + "".join(after)


if __name__ == "__main__":
    EVENTS.write_text(events_text())
    STATUS.write_text(status_text())
    MONITORING.write_text(monitoring_text())
