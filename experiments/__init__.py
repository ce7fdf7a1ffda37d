"""Experiments: one module a result, run with `python -m experiments.NAME`."""
