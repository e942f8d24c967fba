"""Models split into pipeline stages, and their initialization."""

from penstock.runtime.models.materialize import materialize
from penstock.runtime.models.partition import split

__all__ = ["materialize", "split"]
