"""Benchmarks: `python -m benchmarks engine|server|...` or `hodei bench`. They print figures and ratios of one run on this machine."""
