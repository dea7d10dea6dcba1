"""Benchmarks: run one with `python -m benchmarks.cross_entropy`, or all with `make bench`."""
