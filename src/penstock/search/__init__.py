"""Search for the schedule that minimizes an objective at given costs and within a memory limit.

`penstock.search` is this package and can be called: `penstock.search(ranks=4, microbatches=8)` calls
`penstock.search.search`.
"""

from penstock.callable_package import make_callable
from penstock.search.api import search
from penstock.search.fit_memory import FitMemory
from penstock.search.result import OnProgress, Progress, SearchResult
from penstock.search.sharding import PlaceSharding
from penstock.search.zbv_greedy import zbv_greedy

__all__ = ["FitMemory", "OnProgress", "PlaceSharding", "Progress", "SearchResult", "search", "zbv_greedy"]

make_callable(__name__, search)
