"""Search for the schedule that minimizes an objective at given costs and within a memory limit.

`penstock.search` is this package and can be called: `penstock.search(ranks=4, microbatches=8)` calls
`penstock.search.search`.
"""

from penstock.callable_package import make_callable
from penstock.search.memory_policies import FitMemory
from penstock.search.request import search
from penstock.search.result import OnProgress, Progress, SearchResult
from penstock.search.sharding import PlaceSharding

__all__ = ["FitMemory", "OnProgress", "PlaceSharding", "Progress", "SearchResult", "search"]

make_callable(__name__, search)
