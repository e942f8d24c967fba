"""`split`: the stages of a model: an `nn.Sequential`, a decoder of transformers or a traced module.

The stages hold the modules of the model under their old names, so that the `state_dict()`s of all stages
together are that of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torch.fx import GraphModule

from penstock.arguments import printable
from penstock.errors import PartitionError
from penstock.planning.layout import PipelineLayout, layout_of_counts
from penstock.planning.layout_text import parse_layout
from penstock.runtime.models.decoders import Decoder, is_pretrained
from penstock.runtime.models.sequential import split_sequential
from penstock.runtime.models.stage_starts import order_problems, unknown_name
from penstock.runtime.models.tied_tensors import record_tied_weights
from penstock.runtime.models.traced import split_traced

__all__ = ["split"]


def split(
    model: nn.Module, at: Sequence[str] | None = None, *, layout: str | PipelineLayout | None = None
) -> dict[int, nn.Module]:
    """The stages of a model by number.

    `at`      names from `model.named_modules()`, each the first module of a new stage
    `layout`  the number of layers of each stage, as in "Et*3|(tt|)*2,t|L"; see `penstock.planning.layout`

    The model is an `nn.Sequential`, with others nested in it, a decoder of transformers, or a traced module
    (`torch.fx.symbolic_trace(model)`, `torch.export.export(model, ...).module()`), in which values may skip
    stages. The stages share their modules with the model. Without a name there is one stage, for an
    `nn.Sequential` or a traced module the model itself. Every stage has the attribute `tied`: for each weight
    that several stages hold, its name by stage. Those of a traced module have `stage_graph`: which stage feeds
    which.
    """
    if (at is None) == (layout is None):
        which = "neither of them is given" if at is None else "both are given"
        raise PartitionError(f"split() takes either `at`, a list of names, or `layout`, and {which}")
    if isinstance(at, str):
        raise PartitionError(f"`at` is a list of names (given the text {printable(repr(at))}): write [{at!r}]")
    if isinstance(model, GraphModule):
        stages = split_traced(model, at, layout)
    else:
        split_model = _split_decoder if is_pretrained(model) else split_sequential
        stages = split_model(model, at, layout)
    record_tied_weights(stages)
    return stages


def _split_decoder(
    model: nn.Module, at: Sequence[str] | None, layout: str | PipelineLayout | None
) -> dict[int, nn.Module]:
    decoder = Decoder(model)
    if layout is not None:
        return decoder.stages(parse_layout(str(layout), decoder.layers, mtp_layers=0))
    starts = decoder.starts
    names = list(at or ())
    known = [name for name in names if isinstance(name, str) and name in starts]
    valid = [name for name, start in starts.items() if start]
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = [unknown_name(name, valid, exists=name in modules) for name in names if name not in known]
    problems += order_problems([(name, starts[name]) for name in known])
    if problems:
        raise PartitionError("\n".join(problems))
    bounds = [0, *(starts[name][0] - 1 for name in names), decoder.layers]
    return decoder.stages(layout_of_counts([end - start for start, end in pairwise(bounds)]))
