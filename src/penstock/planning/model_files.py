"""Model files: TOML or JSON; all errors are reported at once.

    launch_overhead_seconds = 1e-4        optimizer_step_seconds = 0.01        overlap_factor = 1

    [[layers]]                            [links]
    name = "block"                        latency_seconds = 1e-5
    count = 32                            bandwidth_bytes_per_second = 5e10
    forward_seconds = 0.012
    backward_input_seconds = 0.013        [devices]
    backward_weight_seconds = 0.011       ranks = 8
    parameters_bytes = 436e6              memory_bytes = 80e9
    activation_bytes = 555e6              host_bandwidth_bytes_per_second = 25e9
    activation_message_bytes = 33e6
                                          [batch]
                                          samples = 64

The costs of a layer have the keys of `penstock.cost.costs` and are those of ONE sample, except those that do
not depend on the batch (parameters, gradients, optimizer state, collectives). A message is the output of a
layer; its gradient has the same size unless `gradient_message_bytes` is given. A layer whose backward was
measured as a whole has `backward_seconds` only: I and W are then half of it each. `kind` is `embedding` for the
first layer, `head` for the last one and `mtp` for multi-token prediction layers before it, if the model has
them; it is used for layouts only.

A file without layers is read as costs of stages, as a profile writes them: each stage is a layer, and a sample
is one measured microbatch.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

from penstock.arguments import did_you_mean, printable, whole_number
from penstock.cost.costs import Costs
from penstock.errors import FormatError, PlanError
from penstock.formats.files import read_keys
from penstock.planning.model import (
    HOST_COSTS,
    LINK_COSTS,
    MAX_LAYERS,
    MESSAGES,
    STAGE_COSTS,
    STEP_COSTS,
    UNITS,
    Layer,
    Model,
    errors_in_layers,
)

_TIMES = ["forward_seconds", "backward_input_seconds", "backward_weight_seconds"]
_TABLES = {
    "links": [UNITS[name] for name in LINK_COSTS],
    "devices": ["ranks", "memory_bytes", *(UNITS[name] for name in HOST_COSTS)],
    "batch": ["samples"],
}
_LAYER_KEYS = ["name", "kind", "count", *(UNITS[name] for name in (*STAGE_COSTS, *MESSAGES))]


def read_model(path: str | PathLike[str]) -> Model:
    """Read a model from a `.toml` or `.json` file."""
    return model_of_keys(read_keys(path), source=str(path))


def model_of_keys(document: object, source: str = "<model>") -> Model:
    """The model that a file with these keys describes."""
    if not isinstance(document, dict) or "layers" not in document:
        try:
            return Model.of_stages(Costs.from_keys(document, source), name=source)
        except FormatError as error:
            why = "it has no [[layers]], and is not valid as costs of stages"
            raise FormatError(source, [why, *error.problems]) from None
        except PlanError as error:
            raise FormatError(source, [f"it has no [[layers]], and {error}"]) from None
    errors: list[str] = []
    tables = {name: _table(document, name, keys, errors) for name, keys in _TABLES.items()}
    known = ["layers", "name", *_TABLES, *(UNITS[name] for name in STEP_COSTS)]
    errors += [f"{_shown(k)}: unknown key; the keys are {', '.join(known)}" for k in document if k not in known]
    step = {UNITS[name] for name in STEP_COSTS}
    host = {key: value for key, value in tables["devices"].items() if key in _TABLES["devices"][2:]}
    shared = tables["links"] | host | {key: value for key, value in document.items() if key in step}
    common = _costs(shared, "", errors) or Costs()
    layers = _layers(document["layers"], errors)
    ranks, samples = (
        _count(tables[table].get(key), f"{table}.{key}", errors)
        for table, key in (("devices", "ranks"), ("batch", "samples"))
    )
    memory = tables["devices"].get("memory_bytes")
    if memory is not None and not (_is_number(memory) and memory > 0):
        errors.append(f"devices.memory_bytes: must be a number above 0 (given {_shown(memory)})")
    errors += errors_in_layers(layers) if layers or not errors else ()
    if errors:
        raise FormatError(source, errors)
    name = printable(str(document.get("name", "model")))
    return Model(tuple(layers), common, ranks, memory, samples, name)


def _layers(tables: object, errors: list[str]) -> list[Layer]:
    if not isinstance(tables, list):
        errors.append("layers: must be a list of tables, [[layers]] in TOML")
        return []
    found: list[Layer] = []
    for number, table in enumerate(tables):
        place = f"layers[{number}]"
        if not isinstance(table, dict):
            errors.append(f"{place}: must be a table with keys such as name, count, forward_seconds")
            continue
        unknown = [key for key in table if key not in _LAYER_KEYS]
        errors += [
            f"{place}.{_shown(k)}: unknown key of a layer"
            f"{did_you_mean(str(k), _LAYER_KEYS, 0.7) or '; the keys are ' + ', '.join(_LAYER_KEYS)}"
            for k in unknown
        ]
        count = _count(table.get("count", 1), f"{place}.count", errors) or 1
        priced = {key: v for key, v in table.items() if key in _LAYER_KEYS[3:]}
        errors += [f"{place}.{key}: must be one number" for key, v in priced.items() if isinstance(v, list)]
        costs = _costs(_filled(priced, place, errors), f"{place}.", errors)
        if costs is not None and len(found) + count <= MAX_LAYERS:
            name = printable(str(table.get("name", place)))
            names = [name] if count == 1 else [f"{name} {i}" for i in range(count)]
            found += [Layer(each, costs, str(table.get("kind", "layer"))) for each in names]
        elif costs is not None:
            errors.append(f"{place}.count: at most {MAX_LAYERS} layers are supported (given {count} here)")
    return found


def _filled(priced: dict[str, Any], place: str, errors: list[str]) -> dict[str, Any]:
    """The costs of a layer with defaults; times are required, sizes are optional."""
    both = {"backward_input_seconds", "backward_weight_seconds"}
    whole: Any = priced.get("backward_seconds")
    if _is_number(whole) and not both & set(priced):
        priced = priced | dict.fromkeys(both, whole / 2)
    if missing := [key for key in _TIMES if key not in priced]:
        instead = " (or backward_seconds for both)" if both & set(missing) else ""
        errors.append(f"{place}: missing {', '.join(missing)}{instead}")
    back = priced.get("gradient_message_bytes", priced.get("activation_message_bytes", 0))
    return {"activation_bytes": 0, **priced, "gradient_message_bytes": back}


def _costs(keys: dict[str, Any], place: str, errors: list[str]) -> Costs | None:
    try:
        return Costs.from_keys({key: value for key, value in keys.items() if not isinstance(value, list)})
    except FormatError as error:
        errors += [f"{place}{each}" for each in error.problems]
    return None


def _table(document: dict[str, Any], name: str, keys: list[str], errors: list[str]) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        errors.append(f"{name}: must be a table with {', '.join(keys)}")
        return {}
    errors += [
        f"{name}.{_shown(k)}: unknown key; the keys are {', '.join(keys)}" for k in table if k not in keys
    ]
    errors += [f"{name}.{k}: must be one number" for k, v in table.items() if isinstance(v, list)]
    return {key: value for key, value in table.items() if key in keys and not isinstance(value, list)}


def _count(value: object, place: str, errors: list[str]) -> int | None:
    if value is None:
        return None
    number = whole_number(value)
    if number is None or number < 1:
        errors.append(f"{place}: must be an integer above 0 (given {_shown(value)})")
        return None
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return printable(value if isinstance(value, str) else repr(value))
