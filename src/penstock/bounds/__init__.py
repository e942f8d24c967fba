"""Lower bounds: how short an iteration can be whatever the order of work."""

from penstock.bounds.lower_bounds import OBJECTIVES, RankBounds, bounds, bounds_of, least_needed, preemptive
from penstock.bounds.workload import Bound, Workload

__all__ = ["OBJECTIVES", "Bound", "RankBounds", "Workload", "bounds", "bounds_of", "least_needed", "preemptive"]
