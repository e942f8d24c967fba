"""Tests of the state files of ranks."""
