"""Verification of pipelines: their gradients compared with those of one process."""

from penstock.runtime.verification.gradient_verification import Deviation, Verdict, verdicts, verify_gradients

__all__ = ["Deviation", "Verdict", "verdicts", "verify_gradients"]
