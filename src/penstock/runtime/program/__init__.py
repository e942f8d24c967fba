"""A rank's list of actions, compiled once and run."""
