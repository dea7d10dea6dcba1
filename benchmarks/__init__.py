"""Measured, not claimed: `python -m benchmarks.cross_entropy` and its siblings; `make bench` runs them all."""
