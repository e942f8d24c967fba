"""Tests of traces of other tools, and of what hung runs leave behind."""
