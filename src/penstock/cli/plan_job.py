"""`penstock plan config.json`: the options of a whole job, checked, and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cli.estimate import Precision, Recomputation, config_from, device_from
from penstock.cli.options import Objective, quantile_from
from penstock.cli.plan_options import PlanArguments, names_in
from penstock.cost.estimate import devices, is_config
from penstock.cost.estimate.model_config import is_model_name
from penstock.errors import FormatError
from penstock.formats.files import read_keys
from penstock.planning.job import JobRequest

_PANEL = "With a model config"
_CONFIG_KEYS = {"hidden_size", "num_hidden_layers", "n_embd", "n_layer"}
"""By which a config is known that lacks its model_type."""

DeviceCount: TypeAlias = Annotated[
    int | None, typer.Option("--devices", help="Number of devices of the job.", rich_help_panel=_PANEL)
]
JobDevice: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|FILE",
        help=f"Device: {', '.join(devices())}, or a .toml file; h100 unless given.",
        rich_help_panel=_PANEL,
    ),
]
JobSequence: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--seq", metavar="TOKENS", help="Tokens of a sample; 4096 unless given.", rich_help_panel=_PANEL
    ),
]
JobTensor: TypeAlias = Annotated[
    int | None, typer.Option("--tp", help="Fix the tensor parallel ranks.", rich_help_panel=_PANEL)
]
JobContext: TypeAlias = Annotated[
    int | None, typer.Option("--cp", help="Fix the context parallel ranks.", rich_help_panel=_PANEL)
]
JobExpert: TypeAlias = Annotated[
    int | None, typer.Option("--ep", help="Fix the expert parallel ranks.", rich_help_panel=_PANEL)
]
JobMicrobatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option("--microbatch-size", help="Fix the samples of a microbatch.", rich_help_panel=_PANEL),
]
JobPrecision: TypeAlias = Annotated[
    Precision | None, typer.Option("--precision", help="Of matrix products.", rich_help_panel=_PANEL)
]
JobZero: TypeAlias = Annotated[
    int | None, typer.Option("--zero", help="ZeRO stage, 0 to 3; 1 unless given.", rich_help_panel=_PANEL)
]
JobRecompute: TypeAlias = Annotated[
    Recomputation | None,
    typer.Option("--recompute", help="Fix what each layer recomputes.", rich_help_panel=_PANEL),
]
JobSchedules: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--schedules",
        metavar="LIST",
        help="Only these families, e.g. 1f1b,interleaved-1f1b, which Megatron runs.",
        rich_help_panel=_PANEL,
    ),
]
JobBudget: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--budget",
        help="Simulate this many times more candidates, and search orders for longer.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class JobArguments:
    """The options for a model config; None is not given."""

    devices: DeviceCount = None
    device: JobDevice = None
    sequence: JobSequence = None
    tensor: JobTensor = None
    context: JobContext = None
    expert: JobExpert = None
    microbatch_size: JobMicrobatchSize = None
    precision: JobPrecision = None
    zero: JobZero = None
    recompute: JobRecompute = None
    schedules: JobSchedules = None
    budget: JobBudget = None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        names = {"sequence": "seq", "tensor": "tp", "context": "cp", "expert": "ep"}
        return [f"--{names.get(k, k).replace('_', '-')}" for k, v in vars(self).items() if v is not None]


def is_job(source: str, arguments: JobArguments) -> bool:
    """Whether a source is a model config, or the name of a model; if not, options for one are a usage error."""
    if is_model_name(source):
        return True
    if Path(source).suffix.lower() == ".json":
        try:
            keys = read_keys(source)
        except FormatError as error:
            raise typer.BadParameter(str(error)) from None
        if is_config(keys) or (isinstance(keys, dict) and _CONFIG_KEYS & set(keys)):
            return True
    if arguments.given and Path(source).is_file():
        raise typer.BadParameter(
            f"{', '.join(arguments.given)}: only with a model's config.json, which has a model_type; {source} "
            "has none, so it is read as costs of layers or stages"
        )
    return False


def job_request(source: str, arguments: JobArguments, common: PlanArguments) -> JobRequest:
    """What to plan for a model config."""
    given = {
        "--stages-per-rank": common.stages_per_rank is not None,
        "--objective": common.objective is not Objective.makespan,
    }
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise typer.BadParameter(f"{', '.join(wrong)}: only with a model file, not with a model config")
    config = config_from(source)
    if arguments.devices is None or common.batch is None:
        needed = {"--devices": arguments.devices, "--batch": common.batch}
        missing = [name for name, value in needed.items() if value is None]
        example = f"penstock plan {source} --devices 512 --device h100 --batch 1024 --seq 8192"
        raise typer.BadParameter(f"a model config needs {' and '.join(missing)}, e.g. {example}")
    return JobRequest(
        *(config, device_from(arguments.device or "h100"), arguments.devices, common.batch),
        sequence=4096 if arguments.sequence is None else arguments.sequence,
        precision=(arguments.precision or Precision.bf16).value,
        zero=1 if arguments.zero is None else arguments.zero,
        memory_limit=common.memory or 0.0,
        tensor=arguments.tensor,
        context=arguments.context,
        expert=arguments.expert,
        pipeline=common.ranks,
        microbatch_size=arguments.microbatch_size,
        recompute=None if arguments.recompute is None else arguments.recompute.value,
        families=names_in(arguments.schedules),
        budget=1.0 if arguments.budget is None else arguments.budget,
        search=common.seconds > 0,
        techniques=common.chosen_techniques,
        jitter=common.jitter,
        quantile=quantile_from(common.quantile, common.jitter),
        seed=common.seed,
    )
