"""Models in files: TOML or JSON, every fault told at once.

    launch_overhead_seconds = 1e-4        optimizer_step_seconds = 0.01        overlap_factor = 1

    [[layers]]                            [links]
    name = "block"                        latency_seconds = 1e-5
    count = 32                            bandwidth_bytes_per_second = 5e10
    forward_seconds = 0.012
    backward_input_seconds = 0.013        [devices]
    backward_weight_seconds = 0.011       ranks = 8
    parameters_bytes = 436e6              memory_bytes = 80e9
    activation_bytes = 555e6
    activation_message_bytes = 33e6       [batch]
                                          samples = 64

The costs of a layer have the keys of `penstock.cost.costs` and are those of ONE sample, except what is there
however many samples there are (parameters, gradients, optimizer state, collectives). A message is what it hands
on; the gradient that comes back is as large unless `gradient_message_bytes` says otherwise. A layer whose
backward was only measured whole has `backward_seconds` alone: each half is then half of it. `kind` is
`embedding` for the first layer or `head` for the last one, if the model has them: only layouts ask.

A file without layers is read as the costs of stages, as a profile writes them: each stage is a layer, and a
sample is a microbatch as it was measured.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

from penstock.arguments import printable, whole_number
from penstock.cost.costs import Costs
from penstock.errors import FormatError, PlanError
from penstock.formats.files import read_keys
from penstock.planning.model import (
    MESSAGES,
    MOST_LAYERS,
    OF_A_LINK,
    OF_A_STEP,
    PER_STAGE,
    UNITS,
    Layer,
    Model,
    faults_of_chain,
)

__all__ = ["model_of_keys", "read_model"]

_TIMES = ["forward_seconds", "backward_input_seconds", "backward_weight_seconds"]
_TABLES = {
    "links": [UNITS[name] for name in OF_A_LINK],
    "devices": ["ranks", "memory_bytes"],
    "batch": ["samples"],
}
_LAYER_KEYS = ["name", "kind", "count", *(UNITS[name] for name in (*PER_STAGE, *MESSAGES))]


def read_model(path: str | PathLike[str]) -> Model:
    """From a `.toml` or `.json` file."""
    return model_of_keys(read_keys(path), source=str(path))


def model_of_keys(document: object, source: str = "<model>") -> Model:
    """From the keys of a file."""
    if not isinstance(document, dict) or "layers" not in document:
        try:
            return Model.of_stages(Costs.from_keys(document, source), name=source)
        except FormatError as error:
            why = "it has no [[layers]], and as the costs of stages it is wrong too"
            raise FormatError(source, [why, *error.problems]) from None
        except PlanError as error:
            raise FormatError(source, [f"it has no [[layers]], and {error}"]) from None
    faults: list[str] = []
    tables = {name: _table(document, name, keys, faults) for name, keys in _TABLES.items()}
    known = ["layers", "name", *_TABLES, *(UNITS[name] for name in OF_A_STEP)]
    faults += [f"{_shown(k)}: not a key; they are {', '.join(known)}" for k in document if k not in known]
    step = {UNITS[name] for name in OF_A_STEP}
    shared = tables["links"] | {key: value for key, value in document.items() if key in step}
    common = _costs(shared, "", faults) or Costs()
    layers = _layers(document["layers"], faults)
    ranks, samples = (
        _count(tables[table].get(key), f"{table}.{key}", faults)
        for table, key in (("devices", "ranks"), ("batch", "samples"))
    )
    memory = tables["devices"].get("memory_bytes")
    if memory is not None and not (_is_number(memory) and memory > 0):
        faults.append(f"devices.memory_bytes: it must be a number above 0 (given {_shown(memory)})")
    faults += faults_of_chain(layers) if layers or not faults else ()
    if faults:
        raise FormatError(source, faults)
    name = printable(str(document.get("name", "model")))
    return Model(tuple(layers), common, ranks, memory, samples, name)


def _layers(given: object, faults: list[str]) -> list[Layer]:
    if not isinstance(given, list):
        faults.append("layers: it must be a list of tables, [[layers]] in TOML")
        return []
    found: list[Layer] = []
    for number, table in enumerate(given):
        place = f"layers[{number}]"
        if not isinstance(table, dict):
            faults.append(f"{place}: it must be a table with keys such as name, count, forward_seconds")
            continue
        unknown = [key for key in table if key not in _LAYER_KEYS]
        faults += [
            f"{place}.{_shown(k)}: not a key of a layer; they are {', '.join(_LAYER_KEYS)}" for k in unknown
        ]
        count = _count(table.get("count", 1), f"{place}.count", faults) or 1
        priced = {key: v for key, v in table.items() if key in _LAYER_KEYS[3:]}
        faults += [f"{place}.{key}: it must be one number" for key, v in priced.items() if isinstance(v, list)]
        costs = _costs(_filled(priced, place, faults), f"{place}.", faults)
        if costs is not None and len(found) + count <= MOST_LAYERS:
            name = printable(str(table.get("name", place)))
            names = [name] if count == 1 else [f"{name} {i}" for i in range(count)]
            found += [Layer(each, costs, str(table.get("kind", "layer"))) for each in names]
        elif costs is not None:
            faults.append(f"{place}.count: there can be at most {MOST_LAYERS} layers (given {count} here)")
    return found


def _filled(priced: dict[str, Any], place: str, faults: list[str]) -> dict[str, Any]:
    """With what follows from the rest; times have to be said, sizes may be left out."""
    both = {"backward_input_seconds", "backward_weight_seconds"}
    whole: Any = priced.get("backward_seconds")
    if _is_number(whole) and not both & set(priced):
        priced = priced | dict.fromkeys(both, whole / 2)
    if missing := [key for key in _TIMES if key not in priced]:
        instead = " (or backward_seconds for both halves)" if both & set(missing) else ""
        faults.append(f"{place}: it needs {', '.join(missing)}{instead}")
    back = priced.get("gradient_message_bytes", priced.get("activation_message_bytes", 0))
    return {"activation_bytes": 0, **priced, "gradient_message_bytes": back}


def _costs(keys: dict[str, Any], place: str, faults: list[str]) -> Costs | None:
    try:
        return Costs.from_keys({key: value for key, value in keys.items() if not isinstance(value, list)})
    except FormatError as error:
        faults += [f"{place}{fault}" for fault in error.problems]
    return None


def _table(document: dict[str, Any], name: str, keys: list[str], faults: list[str]) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        faults.append(f"{name}: it must be a table with {', '.join(keys)}")
        return {}
    faults += [f"{name}.{_shown(k)}: not a key; they are {', '.join(keys)}" for k in table if k not in keys]
    faults += [f"{name}.{k}: it must be one number" for k, v in table.items() if isinstance(v, list)]
    return {key: value for key, value in table.items() if key in keys and not isinstance(value, list)}


def _count(value: object, place: str, faults: list[str]) -> int | None:
    if value is None:
        return None
    number = whole_number(value)
    if number is None or number < 1:
        faults.append(f"{place}: it must be a whole number above 0 (given {_shown(value)})")
        return None
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return printable(value if isinstance(value, str) else repr(value))
