"""Search: orders of work found for given costs and memory, rather than by formula."""

from penstock.search.api import search
from penstock.search.result import Progress, SearchResult
from penstock.search.zbv_greedy import zbv_greedy

__all__ = ["Progress", "SearchResult", "search", "zbv_greedy"]
