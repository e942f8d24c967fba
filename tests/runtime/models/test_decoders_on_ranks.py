"""Promise: a decoder of transformers that is split into stages trains as in one process."""

from __future__ import annotations

import warnings
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock
from penstock.planning.layout import even_layout
from penstock.runtime import Pipeline, materialize, split
from tests.support.grids import small, thinned
from tests.support.hub_models import LAYERS, MODELS, batch, decoder, gradients_of, trained
from tests.support.models import next_word
from tests.support.pool import Pools
from tests.support.reference import differences

MICROBATCHES = 4
ROWS = 8


class Case(NamedTuple):
    kind: str
    family: str
    tied: bool = False
    given: str = ""
    layout: str = ""
    meta: bool = False

    def __str__(self) -> str:
        return " ".join(str(value) for value in self if value)


def compared(case: Case, stages_per_rank: int) -> list[str]:
    """What a pipeline on two ranks does otherwise than one process, on this rank."""
    per_rank = stages_per_rank if case.family == "interleaved-1f1b" else None
    schedule = penstock.build(case.family, ranks=2, microbatches=MICROBATCHES, stages_per_rank=per_rank)
    whole = decoder(case.kind, tied=case.tied)
    logits, gradients = trained(whole, ROWS, MICROBATCHES, case.given)
    layout = case.layout or even_layout(LAYERS, schedule.num_stages)
    if case.meta:
        with torch.device("meta"):
            stages = split(decoder(case.kind, tied=case.tied), layout=layout)
        own = schedule.placement.stages_of_rank[torch.distributed.get_rank()]
        for stage in own:
            mine = materialize(stages[stage])
            mine.load_state_dict({name: whole.state_dict()[name] for name in mine.state_dict()})
    else:
        stages = split(decoder(case.kind, tied=case.tied), layout=layout)
    ids, target, named = batch(ROWS, case.given)
    problems: list[str] = []
    with closing(Pipeline(stages, schedule, loss=next_word, timeout=30)) as pipeline:
        found = pipeline.eval(ids, return_outputs=True, **named).outputs
        if found is not None:
            problems += differences("logits", {"": found}, {"": logits}, exact=True)
        pipeline.step(ids, target=target, **named)
        for stage, module in pipeline.modules.items():
            right = {name: gradients[name] for name, _ in module.named_parameters(remove_duplicate=False)}
            problems += differences(f"stage {stage}", gradients_of(module), right, exact=False)
    return problems


def compare(cases: list[Case], stages_per_rank: int) -> list[str]:
    return [f"{case}: {problem}" for case in cases for problem in compared(case, stages_per_rank)]


FAMILIES = ("1f1b", "interleaved-1f1b", "zbv")


def problems_of(pools: Pools, cases: list[Case], stages_per_rank: int = 3) -> list[Any]:
    """Uneven by nature: there are more stages than a divisor of the layers."""
    answers = pools(2).run(compare, cases, stages_per_rank, seconds=600)
    return [f"rank {rank}: {problem}" for rank, answer in enumerate(answers) for problem in answer]


@pytest.mark.parametrize("kind", MODELS)
@small(lambda kind: kind == "llama")
def test_logits_and_gradients_are_those_of_the_model(pools: Pools, kind: str) -> None:
    inputs = ((False, ""), (False, "mask"), (True, "positions"))
    cases = [Case(kind, family, tied=tied, given=given) for family, (tied, given) in zip(FAMILIES, inputs)]
    cases += [Case(kind, "zbv", given="mask"), Case(kind, "interleaved-1f1b", tied=True, given="positions")]
    assert not problems_of(pools, thinned(cases, 4, 1))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.full
def test_stages_may_have_no_layers(pools: Pools, kind: str) -> None:
    cases = [
        Case(kind, "interleaved-1f1b", layout="E|t*3|tt|L"),
        Case(kind, "interleaved-1f1b", tied=True, given="positions", layout="Et*3|t|t|L"),
        Case(kind, "interleaved-1f1b", tied=True, given="mask", meta=True),
    ]
    assert not problems_of(pools, cases, stages_per_rank=2)


@pytest.mark.full
def test_each_rank_can_build_its_own_stages(pools: Pools) -> None:
    cases = [Case(kind, "zbv", meta=True) for kind in MODELS]
    assert not problems_of(pools, cases)


def started(kind: str) -> list[str]:
    """A step of stages that each rank has initialised itself: what their tied copies are afterwards."""
    torch.manual_seed(5)
    with torch.device("meta"):
        stages = split(decoder(kind, tied=True, pad_token_id=3), layout="Et*3|ttL")
    mine = materialize(stages[torch.distributed.get_rank()])
    ids, target, _ = batch(4)
    with closing(Pipeline(stages, "1f1b", microbatches=2, loss=next_word, timeout=30)) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        pipeline.step(ids, target=target)
        optimizer.step()
        optimizer.zero_grad()
        pipeline.step(ids, target=target)
    tie: Any = mine.tied
    weight = mine.get_parameter(tie[0][torch.distributed.get_rank()])
    return [str(float(weight.detach().double().sum()))]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@small(lambda kind: kind == "gpt2")
def test_tied_weights_that_ranks_initialize_alone_are_and_stay_equal(pools: Pools, kind: str) -> None:
    first, second = pools(2).run(started, kind, seconds=600)
    assert first == second


def sharded(kind: str, *, meta: bool) -> list[str]:
    """What stages do otherwise than the model when their layers, and they themselves, are sharded."""
    mesh = init_device_mesh("cpu", (2,))
    whole = decoder(kind)
    logits, gradients = trained(whole, 2, 1, "mask")
    with torch.device("meta" if meta else "cpu"):
        stages: dict[int, Any] = split(decoder(kind), layout="Ett|tt|tL")
    ids, target, named = batch(2, "mask")
    value = ids
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # of a GPT-2 without its head
        warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
        for stage in stages.values():
            for layer in stage.own_layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(stage, mesh=mesh)
            if meta:
                materialize(stage)
                part = {name: whole.state_dict()[name] for name in stage.state_dict()}
                set_model_state_dict(stage, part, options=StateDictOptions(full_state_dict=True))
            value = stage(value, **named)
    next_word(value, target).backward()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {}
    for stage in stages.values():
        found |= {name: weight.grad.full_tensor() for name, weight in stage.named_parameters()}
    return [
        *differences("logits", {"": value.detach()}, {"": logits}, exact=False),
        *differences("gradient", {name: found.get(name) for name in gradients}, dict(gradients), exact=False),
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@small(lambda kind: kind == "llama")
def test_stages_and_their_layers_can_be_sharded(pools: Pools, kind: str) -> None:
    for meta in (False, True):
        assert pools(2).run(partial(sharded, kind, meta=meta), seconds=600) == [[], []]
