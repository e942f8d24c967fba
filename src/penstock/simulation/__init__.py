"""Clocks: schedules run at given costs, timelines, and what follows from them."""
