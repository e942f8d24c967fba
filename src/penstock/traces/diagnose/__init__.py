"""Hangs: what the ranks of a run that hung left behind, and the rank that the others wait for."""
