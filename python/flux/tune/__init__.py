"""Measures the ways to run operators on this machine, for plans to choose by (flux.tuning)."""
