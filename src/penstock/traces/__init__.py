"""Evidence of runs: traces of other tools read as timelines, and what a run that hung left behind."""
