"""Compares what all ranks of a pipeline must have in common, when they connect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

import penstock
from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.formats import dumps
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.data_parallel.wrappers import split_metadata
from penstock.runtime.execution.config import ExecutionConfig
from penstock.runtime.transport.communicator import Communicator

__all__ = ["check_agreement"]

_Facts: TypeAlias = dict[str, tuple[Any, Any]]
"""By topic: the value that is compared, and its text for an error message."""


def check_agreement(config: ExecutionConfig, ties: TiedWeights, communicator: Communicator) -> None:
    """Raise unless every rank has the same schedule, versions and ties: steps would hang or train wrongly.

    A topic is compared between the ranks that have it, such as a tied weight between those that hold it.
    """
    own = json.dumps(_facts(config, ties))
    texts = communicator.exchange_texts("facts", own, config.rank, config.timeout)
    if differences := list(_differences([json.loads(text) for text in texts])):
        raise PipelineError("the ranks of the pipeline do not agree:\n" + "\n".join(differences))


def _facts(config: ExecutionConfig, ties: TiedWeights) -> _Facts:
    schedule = config.schedule
    digest = hashlib.sha256(dumps(schedule.renamed("any"), "json").encode()).hexdigest()[:12]
    facts: _Facts = {
        "version of penstock": (penstock.__version__, penstock.__version__),
        "version of torch": (torch.__version__, torch.__version__),
        "microbatches": (schedule.microbatches, schedule.microbatches),
        "stages": (schedule.num_stages, schedule.num_stages),
        "schedule": (digest, f"{schedule.name} ({digest})"),
        "tied weights": (str(ties.between_ranks), listed(ties.between_ranks) or "none"),
    }
    facts |= {f"tied weight {tie}": (looks, looks) for tie, looks in ties.descriptions().items()}
    for module in config.modules.values():
        _, parts = split_metadata(module, "split_stage") or (0, ())
        if len(parts) == schedule.num_stages:
            split = " | ".join(parts)
            facts["split of the model"] = (split, split)
    has_loss = schedule.placement.stage_to_rank[-1] == config.rank  # it weights losses by the replicas
    trained = [each for module in config.trained.values() for each in module.parameters()]
    if has_loss or any(parameter.requires_grad for parameter in trained):
        count = config.replication.count
        text = f"{count}" if count > 1 else "1 (give replicas= if there are more)"
        facts["replicas of its stages"] = (count, text)
    return facts


def _differences(by_rank: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each topic on which ranks differ."""
    for topic in dict.fromkeys(topic for facts in by_rank for topic in facts):
        answers = {rank: facts[topic] for rank, facts in enumerate(by_rank) if topic in facts}
        if len({value for value, _ in answers.values()}) > 1:
            ranks_by_text: dict[object, list[int]] = {}
            for rank, (_, text) in answers.items():
                ranks_by_text.setdefault(text, []).append(rank)
            groups = "; ".join(f"rank {listed(ranks)}: {text}" for text, ranks in ranks_by_text.items())
            yield f"  {topic}: {groups}"
