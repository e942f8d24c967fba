"""Verification of pipelines: their gradients compared with those of one process."""

from penstock.runtime.verification.gradient_verification import Verdict, verdicts, verify_gradients
from penstock.runtime.verification.verification_worker import Deviation

__all__ = ["Deviation", "Verdict", "verdicts", "verify_gradients"]
