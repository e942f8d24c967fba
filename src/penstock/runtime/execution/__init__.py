"""Execution of a rank's list of actions: batches, stages, programs and the connection they use."""
