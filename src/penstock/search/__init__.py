"""Search for the schedule that minimizes an objective at given costs and within a memory limit.

`penstock.search` is this package and can be called: `penstock.search(ranks=4, microbatches=8)` calls
`penstock.search.search`.
"""

import inspect
import sys
from types import ModuleType

from penstock.search.api import search
from penstock.search.fit_memory import FitMemory
from penstock.search.result import OnProgress, Progress, SearchResult
from penstock.search.sharding import PlaceSharding
from penstock.search.zbv_greedy import zbv_greedy

__all__ = ["FitMemory", "OnProgress", "PlaceSharding", "Progress", "SearchResult", "search", "zbv_greedy"]


class _CallablePackage(ModuleType):
    __call__ = staticmethod(search)
    __signature__ = inspect.signature(search)


sys.modules[__name__].__class__ = _CallablePackage
__doc__ = f"{__doc__}\n{inspect.getdoc(search)}\n"
