"""Take it away: files of a schedule or a picture, and the lines that make the same elsewhere."""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from penstock.cost.costs import Costs
from penstock.errors import FormatError, PenstockError
from penstock.formats import dumps
from penstock.integrations import export_torchtitan
from penstock.ir.schedule import Schedule
from penstock.planning.layout import even_layout
from penstock.web.answers import timeline_of
from penstock.web.request import SOURCE, DrawRequest, parse_request

_PICTURES = {"svg": "image/svg+xml", "png": "image/png", "html": "text/html", "trace": "application/json"}
_VIEWS = {"trace": "perfetto"}
_FILES = {"csv": "text/csv", "json": "application/json"}


def export(document: object) -> dict[str, Any]:
    """One format: a file of the schedules, or `lines`, the commands that make the same."""
    request = parse_request(document, {"format": (str,), "layers": (int,)})
    wanted = request.extra["format"]
    if wanted == "lines":
        return _lines(request, request.extra["layers"])
    if wanted in _PICTURES:
        return _picture(request, wanted)
    if wanted in _FILES:
        schedule = request.schedule(0)
        return _file(f"{_stem(schedule)}.{wanted}", _FILES[wanted], dumps(schedule, wanted).encode())
    raise FormatError(SOURCE, [f"format: one of {', '.join((*_FILES, *_PICTURES, 'lines'))} (given {wanted})"])


def _picture(request: DrawRequest, wanted: str) -> dict[str, Any]:
    timelines = [timeline_of(request, index) for index in range(len(request.schedules))]
    view = getattr(import_module(f"penstock.view.{_VIEWS.get(wanted, wanted)}"), wanted)
    content = view(timelines)
    suffix = "trace.json" if wanted == "trace" else wanted
    data = content.encode() if isinstance(content, str) else content
    return _file(f"{_stem(timelines[0].schedule)}.{suffix}", _PICTURES[wanted], data)


def _file(name: str, kind: str, content: bytes) -> dict[str, Any]:
    return {"file": name, "type": kind, "base64": b64encode(content).decode()}


def _stem(schedule: Schedule) -> str:
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in schedule.name).strip("-")
    return f"{plain or 'schedule'}-p{schedule.num_ranks}-m{schedule.microbatches}"


# --- lines -----------------------------------------------------------------------------------------


def _lines(request: DrawRequest, layers: int | None) -> dict[str, Any]:
    """The command, the Python and the torchtitan flags of the first schedule, and the cost file they need."""
    schedule = request.schedule(0)
    costs = request.costs_for(schedule)
    source = request.schedules[0]
    keys = costs.to_keys()
    return {
        "command": _command(request, source, schedule, keys),
        "python": _python(request, source, schedule, costs),
        "costs": "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()),
        "torchtitan": _torchtitan(schedule, layers or schedule.num_stages),
    }


def _command(
    request: DrawRequest, source: Mapping[str, Any], schedule: Schedule, keys: Mapping[str, Any]
) -> str:
    words = ["penstock", "simulate"]
    if "family" in source:
        words += [source["family"], "-p", source["ranks"], "-m", source["microbatches"]]
        options = (("stages_per_rank", "-v"), ("group", "--group"))
        words += [word for key, flag in options if source.get(key) for word in (flag, _value(source[key]))]
    else:
        words.append(f"{_stem(schedule)}.csv")
    for key in ("recompute", "offload"):
        words += [f"--{key}", source[key]] if source.get(key) else []
    words += ["--lowered"] if request.lowered else []
    words += ["--costs", "costs.toml"] if keys else []
    words += [] if request.send_model.is_buffered else ["--send-model", str(request.send_model)]
    words += ["--jitter", f"{request.jitter:g}"] if request.jitter else []
    return shlex.join(map(str, words))


def _value(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _python(request: DrawRequest, source: Mapping[str, Any], schedule: Schedule, costs: Costs) -> str:
    if "family" in source:
        sizes = [f"ranks={source['ranks']}", f"microbatches={source['microbatches']}"]
        sizes += [f"{key}={source[key]!r}" for key in ("stages_per_rank", "group") if source.get(key)]
        made = f"penstock.build({source['family']!r}, {', '.join(sizes)})"
    else:
        made = f"penstock.read({_stem(schedule) + '.csv'!r})"
    lines = ["import penstock", "", f"schedule = {made}"]
    makers = {"recompute": "Recompute", "offload": "Offload"}
    for key, name in makers.items():
        if source.get(key):
            lines.insert(1, f"from penstock.lowering import {name}, parse_policy")
            lines.append(f"schedule = penstock.lower(schedule, [{name}(*parse_policy({source[key]!r}))])")
    if request.lowered or not request.send_model.is_buffered:
        lines.append("schedule = penstock.lower(schedule)")
    model = "" if request.send_model.is_buffered else f", send_model={str(request.send_model)!r}"
    lines.append(f"timeline = penstock.simulate(schedule, penstock.{costs!r}{model})")
    return (
        "\n".join([*lines, "print(timeline.makespan, timeline.bubble_rate, max(timeline.peak_memory))"]) + "\n"
    )


def _torchtitan(schedule: Schedule, layers: int) -> dict[str, Any]:
    """The flags, or why torchtitan cannot run it."""
    try:
        made = export_torchtitan(schedule, even_layout(layers, schedule.num_stages))
    except PenstockError as error:
        return {"error": str(error)}
    return {"flags": list(made.flags), "notes": list(made.notes), "files": dict(made.files)}
