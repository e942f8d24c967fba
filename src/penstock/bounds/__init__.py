"""Lower bounds: how short an iteration can be whatever the order of work."""

from penstock.bounds.bound import Bound
from penstock.bounds.lower_bounds import OBJECTIVES, bounds, bounds_of, preemptive
from penstock.bounds.memory_bounds import least_needed
from penstock.bounds.rank_subsets import RankBounds
from penstock.bounds.workload import Workload

__all__ = ["OBJECTIVES", "Bound", "RankBounds", "Workload", "bounds", "bounds_of", "least_needed", "preemptive"]
