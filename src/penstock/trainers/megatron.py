"""Export to Megatron: the flags of the schedules that it runs, 1F1B and interleaved 1F1B.

Interleaved 1F1B has stages in a loop, equally many on each rank, in groups of `group` microbatches
(`--microbatch-group-size-per-vp-stage`). Its order with overlapped pairs is `interleaved-overlap`
(`--overlap-moe-expert-parallel-comm`). With a layout, the number of stages per rank follows from it.
"""

from __future__ import annotations

from penstock.arguments import plural
from penstock.ir.schedule import Schedule
from penstock.planning.layout import PipelineLayout
from penstock.trainers.export import Export, check_layout, check_schedule, raise_problems

_FAMILIES = ("1f1b", "interleaved-1f1b", "interleaved-overlap")


def export_megatron(schedule: Schedule, layout: PipelineLayout, microbatch_size: int = 1) -> Export:
    """The flags for Megatron."""
    found, problems = check_schedule(schedule, "Megatron")
    problems += check_layout(schedule, layout, can_be_empty=True)
    known = [family for family in found.families if family in _FAMILIES]
    per_rank = schedule.num_stages // schedule.num_ranks
    if not known or schedule.placement.style != "loop":
        nearest = "1f1b" if per_rank == 1 else f"interleaved-1f1b with {plural(per_rank, 'stage')} per rank"
        problems.append(
            f"Megatron runs {', '.join(_FAMILIES)} only, and this schedule is {found}; nearest is {nearest}"
        )
    else:
        problems += _check_groups(schedule, found.groups.get(known[0]))
    problems += _check_prediction(layout, schedule.num_ranks)
    raise_problems("Megatron", schedule, problems)
    family, group = known[0], found.groups.get(known[0])
    flags = [
        f"--pipeline-model-parallel-size {schedule.num_ranks}",
        f"--pipeline-model-parallel-layout '{layout}'",
        f"--num-layers {layout.layers}",
        f"--micro-batch-size {microbatch_size}",
    ]
    if layout.mtp_layers:
        flags.append(f"--mtp-num-layers {layout.mtp_layers}")
    if group:
        flags.append(f"--microbatch-group-size-per-vp-stage {group}")
    if family == "interleaved-overlap":
        flags.append("--overlap-moe-expert-parallel-comm")
    batch = schedule.microbatches * microbatch_size
    notes = [f"--global-batch-size is {batch} times the data-parallel size"]
    if not layout.mtp_layers and all(len(stage.layers) == len(layout[0].layers) for stage in layout):
        per_stage = f"--num-layers-per-virtual-pipeline-stage {len(layout[0].layers)}"
        instead = f"with {per_stage} instead of" if per_rank > 1 else "without"
        notes.append(f"{instead} --pipeline-model-parallel-layout Megatron makes the same stages")
    return Export("Megatron", {"flags.txt": " \\\n".join(flags) + "\n"}, flags, notes)


def _check_groups(schedule: Schedule, given: int | None) -> list[str]:
    """Megatron's own rule for the microbatches of interleaved 1F1B: no short last group."""
    ranks, microbatches = schedule.num_ranks, schedule.microbatches
    group = given or ranks
    if schedule.num_stages == ranks or (microbatches >= group and not 0 < microbatches % group < ranks):
        return []
    nearest = max(microbatches // group, 1) * group
    problem = (
        f"Megatron divides the microbatches of interleaved schedules into groups of {group}, and the last one "
        f"must have at least {ranks}, one for each rank (given {plural(microbatches, 'microbatch')}): "
        f"try {plural(nearest, 'microbatch')}"
    )
    return [problem]


def _check_prediction(layout: PipelineLayout, ranks: int) -> list[str]:
    """Megatron's own rules for multi-token prediction layers."""
    stages = [number for number, stage in enumerate(layout) if stage.mtp_layers]
    if stages and stages[0] < len(layout) - ranks:
        return [f"MTP layers (m) must be in the last stage of their rank, and stage {stages[0]} is not"]
    return []
