"""What the ranks of a pipeline must have in common, compared when they connect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import nn

import penstock
from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.formats import dumps
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.data_parallel.wrappers import split_metadata
from penstock.runtime.execution.connections import Plan
from penstock.runtime.transport.links import Links

__all__ = ["refuse_disagreement"]


def refuse_disagreement(
    plan: Plan,
    ties: TiedWeights,
    modules: Mapping[int, nn.Module],
    trained: Mapping[int, nn.Module],
    links: Links,
) -> None:
    """Every rank must have the same schedule, version and ties, or steps would hang or train wrongly.

    A rank has no say in what it does not mention: in tied weights that it does not hold, for example.
    """
    schedule = plan.schedule
    steps = hashlib.sha256(dumps(schedule.renamed("any"), "json").encode()).hexdigest()[:12]
    mine = {  # what is compared, and how it is told
        "version of penstock": (penstock.__version__, penstock.__version__),
        "version of torch": (torch.__version__, torch.__version__),
        "microbatches": (schedule.microbatches, schedule.microbatches),
        "stages": (schedule.num_stages, schedule.num_stages),
        "schedule": (steps, f"{schedule.name} ({steps})"),
        "tied weights": (str(ties.all), listed(ties.all) or "none"),
    }
    mine |= {f"tied weight {tie}": (looks, looks) for tie, looks in ties.descriptions().items()}
    for module in modules.values():
        _, parts = split_metadata(module, "cut") or (0, ())
        if len(parts) == schedule.num_stages:
            cut = " | ".join(parts)
            mine["cut of the model"] = (cut, cut)
    weighs = schedule.placement.stage_to_rank[-1] == plan.rank  # the loss, with or without parameters
    if weighs or any(each.requires_grad for module in trained.values() for each in module.parameters()):
        count = plan.replication.count
        told = f"{count}" if count > 1 else "1 (say replicas= if there are more)"
        mine["replicas of its stages"] = (count, told)
    texts = links.agree("about", json.dumps(mine), plan.rank, len(plan.members), plan.timeout)
    everyone = [json.loads(text) for text in texts]
    faults = []
    for what in dict.fromkeys(what for about in everyone for what in about):
        answers = {rank: about[what] for rank, about in enumerate(everyone) if what in about}
        if len({compared for compared, _ in answers.values()}) > 1:
            said: dict[object, list[int]] = {}
            for rank, (_, words) in answers.items():
                said.setdefault(words, []).append(rank)
            told = "; ".join(f"rank {listed(ranks)}: {words}" for words, ranks in said.items())
            faults.append(f"  {what}: {told}")
    if faults:
        raise PipelineError("the ranks of the pipeline do not agree:\n" + "\n".join(faults))
