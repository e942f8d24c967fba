"""Compares what all ranks of a pipeline must have in common, when they connect and when they connect again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

import penstock
from penstock.arguments import listed
from penstock.errors import PipelineError
from penstock.formats import dumps
from penstock.ir.schedule import Schedule
from penstock.runtime.config import ExecutionConfig
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.data_parallel.wrappers import split_metadata
from penstock.runtime.transport.communicator import Communicator

Facts: TypeAlias = Mapping[str, tuple[Any, Any]]
"""By topic: the value that is compared, and its text for an error message."""


COMPLETED = "completed calls of step() and eval()"
_ADVICE = (
    "A call has ended with a result on the ranks that are ahead, and with an exception on the others, for "
    "example because it was interrupted at its end. So the ranks have trained on different batches: load a "
    "checkpoint and create the pipeline again on every rank, and continue from the batch of the checkpoint"
)


def check_agreement(
    config: ExecutionConfig,
    ties: TiedWeights,
    completed: int,
    loss_options: Mapping[str, object],
    communicator: Communicator,
) -> None:
    """Raise unless every rank has the same schedule, versions, ties and number of completed calls.

    Steps would hang or train wrongly. A topic is compared between the ranks that have it, such as a tied weight
    between those that hold it, and `loss_options` between those that compute a loss.
    """
    facts = _facts(config, ties) | {topic: (value, value) for topic, value in loss_options.items()}
    own = json.dumps({**facts, COMPLETED: (completed, completed)})
    texts = communicator.exchange_texts("facts", own)
    if found := differences({rank: json.loads(text) for rank, text in enumerate(texts)}):
        advice = [_ADVICE] if COMPLETED in found else []
        raise PipelineError("\n".join(["the ranks of the pipeline do not agree:", *found.values(), *advice]))


def _facts(config: ExecutionConfig, ties: TiedWeights) -> dict[str, tuple[Any, Any]]:
    schedule, digits = config.schedule, schedule_digest(config.schedule)
    facts: dict[str, tuple[Any, Any]] = {
        "version of penstock": (penstock.__version__, penstock.__version__),
        "version of torch": (torch.__version__, torch.__version__),
        "microbatches": (schedule.microbatches, schedule.microbatches),
        "stages": (schedule.num_stages, schedule.num_stages),
        "schedule": (digits, f"{schedule.name} ({digits})"),
        "tied weights": (str(ties.between_ranks), listed(ties.between_ranks) or "none"),
    }
    facts |= {f"tied weight {tie}": (looks, looks) for tie, looks in ties.descriptions().items()}
    for module in config.modules.values():
        _, parts = split_metadata(module, "split_stage") or (0, ())
        if len(parts) == schedule.num_stages:
            split = " | ".join(parts)
            facts["split of the model"] = (split, split)
    has_loss = any(sink in config.modules for sink in schedule.graph.sinks)  # it weights losses by the replicas
    trained = [each for module in config.trained.values() for each in module.parameters()]
    if has_loss or any(parameter.requires_grad for parameter in trained):
        count = config.replication.count
        text = f"{count}" if count > 1 else "1 (give replicas= if there are more)"
        facts["replicas of its stages"] = (count, text)
    return facts


def digest(text: str) -> str:
    """A few digits in place of a long text, to compare it and to show it in a message."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def schedule_digest(schedule: Schedule) -> str:
    """The same for schedules that differ in their names only."""
    return digest(dumps(schedule.renamed("any"), "json"))


def facts_in(text: str | bytes) -> dict[str, tuple[object, object]]:
    """The facts that a rank sent as a JSON object; values are their own texts."""
    return {topic: (value, value) for topic, value in json.loads(text).items()}


def differences(by_rank: Mapping[int, Facts]) -> dict[str, str]:
    """Return the topics on which ranks differ, each with a line for an error message."""
    lines = {}
    for topic in dict.fromkeys(topic for facts in by_rank.values() for topic in facts):
        answers = {rank: facts[topic] for rank, facts in by_rank.items() if topic in facts}
        if len({value for value, _ in answers.values()}) > 1:
            ranks_by_text: dict[object, list[int]] = {}
            for rank, (_, text) in answers.items():
                ranks_by_text.setdefault(text, []).append(rank)
            groups = "; ".join(f"rank {listed(ranks)}: {text}" for text, ranks in ranks_by_text.items())
            lines[topic] = f"  {topic}: {groups}"
    return lines
