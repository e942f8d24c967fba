"""Schedule families: one module per idea, and the registry that finds a family by name.

To add a family, write a function that takes ranks, microbatches and stages_per_rank and returns a `Schedule`,
and decorate it with `@register("name", "one-line summary")`.

`penstock.families` is this package and can be called: `penstock.families()` is `penstock.families.families()`.
"""

from penstock.callable_package import make_callable

# importing a family registers it; the order of the imports is the order of `penstock list`
from penstock.families.gpipe import gpipe, looped_bfs  # isort: skip
from penstock.families.one_f_one_b import eager_1f1b, one_f_one_b  # isort: skip
from penstock.families.interleaved import forward_only, interleaved_1f1b, interleaved_zero_bubble  # isort: skip
from penstock.families.interleaved_overlap import interleaved_overlap  # isort: skip
from penstock.families.grouped_interleaved import gis, gis_h  # isort: skip
from penstock.families.pipe_offload import po_h  # isort: skip
from penstock.families.zero_bubble import zb_h1, zb_h2  # isort: skip
from penstock.families.zbv import zbv  # isort: skip
from penstock.families.v_memory import v_half, v_min  # isort: skip
from penstock.families.dualpipev import dualpipev  # isort: skip
from penstock.families.encoder_decoder import encoder_decoder
from penstock.families.registry import Family, build, families, find, register

__all__ = [
    "Family",
    "build",
    "dualpipev",
    "eager_1f1b",
    "encoder_decoder",
    "families",
    "find",
    "forward_only",
    "gis",
    "gis_h",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_overlap",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "po_h",
    "register",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
]

make_callable(__name__, families)
