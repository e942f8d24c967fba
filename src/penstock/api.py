"""The public names of the package, gathered from the modules that define them."""

from penstock import errors
from penstock.cost.costs import Costs
from penstock.errors import *  # noqa: F403 -- all of them
from penstock.families import Family, build, encoder_decoder, families, register
from penstock.formats import read
from penstock.ir.action import Action, Overlap, parse_action
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.planning import plan
from penstock.planning.layout import even_layout, parse_layout
from penstock.recognition import recognize
from penstock.search import SearchResult, search
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.traces.read.measured_run import MeasuredRun, read_trace
from penstock.validation import SendModel, Violation, validate

__all__ = [
    "Action",
    "Costs",
    "Family",
    "Kind",
    "MeasuredRun",
    "Overlap",
    "Placement",
    "Schedule",
    "SearchResult",
    "SendModel",
    "StageGraph",
    "Timeline",
    "Violation",
    "build",
    "encoder_decoder",
    "even_layout",
    "families",
    "lower",
    "parse_action",
    "parse_layout",
    "plan",
    "read",
    "read_trace",
    "recognize",
    "register",
    "search",
    "simulate",
    "validate",
]
__all__ += errors.__all__
