"""Models that come apart into stages."""

from penstock.runtime.models.materialize import materialize
from penstock.runtime.models.partition import split

__all__ = ["materialize", "split"]
