"""Tests that every name of torch exists here and takes torch's parameters.

These are the public names, and the underscored ones that users of torch rely on.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from penstock.pipelining import schedules as ours_untyped

ours: Any = ours_untyped
theirs: Any = importlib.import_module("torch.distributed.pipelining.schedules")

MODULES = ("", ".schedules", ".stage", ".microbatch", "._utils", "._schedule_visualizer")

PRIVATE = (".schedules", ".stage", ".microbatch", "._utils", "._backward", "._IR", "._debug", "._unflatten")

CLASSES = """
PipelineScheduleMulti PipelineScheduleSingle Schedule1F1B ScheduleDualPipeV ScheduleGPipe
ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleZBVZeroBubble
_Action _ComputationType
_CustomFunctionProtocol _PipelineContext _PipelineSchedule _PipelineScheduleRuntime _ScheduleForwardOnly
""".split()  # noqa: SIM905 -- a readable list of names

FUNCTIONS = """
_add_reduce_grad _add_send_recv _add_unshard_reshard _batch_p2p _check_torch_compile_compatibility
_defer_recv_ops _dump_chrometrace _format_pipeline_order _get_1f1b_rank_ops _get_profiler_function_name
_merge_bw _requires_reduce_grad _simulate_comms_compute _sorted_batch_p2p _validate_schedule _wait_batch_p2p
get_schedule_class
""".split()  # noqa: SIM905 -- a readable list of names

METHODS = """
__call__ __init__ __repr__ __str__ _add_bubbles_to_actions _assert_unsharded _calculate_single_rank_operations
_check_inputs _compute_loss _dump_csv _get_pipeline_order _initialize_stage _initialize_stages _load_csv
_maybe_compute_loss _maybe_get_loss _merge_outputs _prepare_schedule_with_comms _simulate _split_inputs
_step_microbatches _update_losses _validate_and_set_stage_mapping eval from_str is_compute_op
register_custom_function step
""".split()  # noqa: SIM905 -- a readable list of names

CONSTANTS = """
B BACKWARD_INPUT BACKWARD_WEIGHT F FORWARD FULL_BACKWARD I OVERLAP_F_B RECV_B RECV_F REDUCE_GRAD RESHARD SEND_B
SEND_F UNSHARD W
""".split()  # noqa: SIM905 -- a readable list of names


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def names_of(module: Any) -> list[str]:
    """The names in `__all__`, or else those defined without an underscore."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_here_with_every_parameter(module: str) -> None:
    torchs = importlib.import_module(f"torch.distributed.pipelining{module}")
    here = importlib.import_module(f"penstock.pipelining{module}")
    names = names_of(torchs)
    assert names
    assert [name for name in names if not hasattr(here, name)] == []
    if hasattr(torchs, "__all__"):
        assert set(names) <= set(here.__all__)
    for name in names:
        if callable(getattr(torchs, name)) and getattr(torchs, name) is not getattr(here, name):
            wanted, got = (set(inspect.signature(getattr(m, name)).parameters) for m in (torchs, here))
            assert wanted <= got, name


@pytest.mark.parametrize("module", PRIVATE)
def test_every_private_name_is_here(module: str) -> None:
    torchs = importlib.import_module(f"torch.distributed.pipelining{module}")
    here = importlib.import_module(f"penstock.pipelining{module}")
    names = [name for name in vars(torchs) if not name.startswith("__")]
    assert names
    assert [name for name in names if not hasattr(here, name)] == []


def test_a_name_that_torch_does_not_have_is_an_error() -> None:
    with pytest.raises(ImportError, match=r"'_RecvData' from 'penstock\.pipelining\.stage'"):
        exec("from penstock.pipelining.stage import _RecvData")  # noqa: S102 -- as a script does
    with pytest.raises(AttributeError, match=r"'penstock\.pipelining\._IR' has no attribute 'Pip'"):
        importlib.import_module("penstock.pipelining._IR").Pip  # noqa: B018


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS, *CONSTANTS])
def test_every_listed_name_is_here(name: str) -> None:
    assert hasattr(theirs, name), "torch has it"
    assert hasattr(ours, name)


@pytest.mark.parametrize("name", CONSTANTS)
def test_computation_types_are_torchs_own(name: str) -> None:
    assert getattr(ours, name) is getattr(theirs, name)


@pytest.mark.parametrize("name", [name for name in CLASSES if "Schedule" in name])
def test_constructors_have_torchs_parameters_and_defaults(name: str) -> None:
    if name != "_PipelineSchedule":
        assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_torchs_arguments(name: str) -> None:
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


@pytest.mark.parametrize("method", METHODS)
def test_methods_are_where_torch_has_them_and_take_its_arguments(method: str) -> None:
    found = 0
    for name in CLASSES:
        wanted = getattr(theirs, name).__dict__.get(method)
        if wanted is None:
            continue
        found += 1
        got = getattr(getattr(ours, name), method)
        if callable(wanted) and method != "__init__":
            missing = set(inspect.signature(getattr(getattr(theirs, name), method)).parameters)
            missing -= set(inspect.signature(got).parameters)
            assert not missing, f"{name}.{method}"
    assert found


def test_schedule_classes_are_found_by_torchs_names_in_any_case() -> None:
    names = (
        "1F1B",
        "Interleaved1F1B",
        "GPipe",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "PipelineScheduleSingle",
        "PipelineScheduleMulti",
        "ZBVZeroBubble",
        "DualPipeV",
    )
    for name in names:
        wanted = theirs.get_schedule_class(name).__name__
        assert {ours.get_schedule_class(n).__name__ for n in (name, name.lower(), name.upper())} == {wanted}
    with pytest.raises(ValueError, match=r"'2F2B'.*DualPipeV"):
        ours.get_schedule_class("2F2B")


def test_our_schedules_are_subclasses_of_torchs() -> None:
    assert issubclass(ours.Schedule1F1B, theirs.PipelineScheduleSingle)
    assert issubclass(ours.ScheduleZBVZeroBubble, theirs.PipelineScheduleMulti)
    assert issubclass(ours._PipelineScheduleRuntime, theirs._PipelineScheduleRuntime)
