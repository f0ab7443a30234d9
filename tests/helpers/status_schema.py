"""Makes docs/status.schema.json; `python -m tests.helpers.status_schema` writes it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ntt_backup.catalog.dump_history import DumpRun
from ntt_backup.catalog.history import Run
from ntt_backup.catalog.stats import StoredObjects, Totals
from ntt_backup.daemon.control.run_report import DaemonReport
from ntt_backup.newest import Newest
from ntt_backup.report.health import Health
from ntt_backup.snapshot.last_take import Last

FILE = Path(__file__).parents[2] / "docs" / "status.schema.json"
_NAMES = "#/$defs/{model}"


def schema() -> dict[str, Any]:
    """The schema of the object of one target."""
    classes: tuple[type, ...] = (Totals, StoredObjects, Run, DumpRun, Last, Newest, DaemonReport)
    defs: dict[str, Any] = {}
    for one in classes:
        made = TypeAdapter(one).json_schema(ref_template=_NAMES, mode="serialization")
        defs |= made.pop("$defs", {})
        defs[one.__name__] = made
    for name, made in defs.items():
        made["description"] = " ".join(made.get("description", name).split())
        made["required"] = list(made["properties"])
        made["additionalProperties"] = False
    text, count = {"type": "string"}, {"type": "integer"}
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
            health=_object(level=level, points=_list(_object(level=level, what=text, do=text))),
            **totals["properties"],
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


def text() -> str:
    """The whole file."""
    return json.dumps(_untitled(schema()), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
