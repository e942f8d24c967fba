"""The whole job: from a model config, a device and their number to parallel sizes, schedule and step time."""

from penstock.planning.job.planner import JobPlan, plan_job
from penstock.planning.job.request import JobRequest

__all__ = ["JobPlan", "JobRequest", "plan_job"]
