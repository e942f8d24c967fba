"""Measurements beside the rival, in one run, with the ratio printed."""
