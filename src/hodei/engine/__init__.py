"""DECIDES: given gangs, nodes and the time, a Plan. Pure, synchronous, deterministic; no clock, no I/O, no randomness.

The story: `cycle` takes each gang in queue order through the points of its `profile` (contracts in `points`),
over the columnar table in `nodes`, and writes a `plan`; `explain` tells why, with the same plugin calls.
"""
