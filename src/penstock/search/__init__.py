"""Search: orders of work found for given costs, rather than by formula."""

from penstock.search.zbv_greedy import zbv_greedy

__all__ = ["zbv_greedy"]
