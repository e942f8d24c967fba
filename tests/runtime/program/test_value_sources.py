"""Promise: a stage takes each input and gradient from its channel, or from another stage of its rank."""

from __future__ import annotations

from typing import Any

from penstock import Kind, Placement, StageGraph, build
from penstock.runtime.program.channel_ends import ValueSources
from penstock.runtime.transport.channels import FlatValue


class Recording:
    """A stage or a channel that records who takes what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def _taken(self, *args: int) -> FlatValue:
        self._log.append(f"{self._name} {args}")
        return FlatValue([], None, [], ())

    take = take_value = _taken


def sources_of_rank_1(log: list[str]) -> tuple[ValueSources, dict[int, Any]]:
    """Stages 1 and 2 of a chain of four with a skip connection from stage 0 to stage 2."""
    graph = StageGraph(4, ((0, 1), (0, 2), (1, 2), (2, 3)))
    schedule = build("gpipe", graph=graph, ranks=2, microbatches=1, placement=Placement((0, 1, 1, 0)))
    keys = [(Kind.RECV_F, 1, 0), (Kind.RECV_B, 2, 3)]
    channels: Any = Recording("", log)
    channels.receives = {key: Recording(f"{key[0].value} {key[1]} {key[2]}", log) for key in keys}
    sources, stages = (
        ValueSources(schedule, channels, (1, 2)),
        {s: Recording(f"stage {s}", log) for s in (1, 2)},
    )
    sources.stages.update(stages)  # type: ignore[arg-type]
    return sources, stages


def test_values_come_from_channels_and_from_stages_of_the_rank() -> None:
    log: list[str] = []
    sources, stages = sources_of_rank_1(log)
    gradients = sources.gradients(1), sources.gradients(2)
    for gradient in gradients:
        assert gradient is not None
        gradient(0)
    assert log == ["stage 2 (0, 1)", "RECV_B 2 3 (0,)"]
    assert len(stages) == 2


def test_stages_that_use_the_same_value_share_one_receive() -> None:
    log: list[str] = []
    sources, _ = sources_of_rank_1(log)
    first, second = (sources._source(stage, (Kind.RECV_F, 1, 0)) for stage in (1, 2))
    assert (first(0), second(0)) == (FlatValue([], None, [], ()),) * 2
    assert log == ["RECV_F 1 0 (0,)"]
