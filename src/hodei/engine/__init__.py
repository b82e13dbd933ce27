"""The decision engine: gangs, nodes and the time in, a Plan out. Pure and deterministic: no clock, no I/O, no
randomness.

`cycle` takes each gang through the extension points of its `profile` (contracts in `points`), over the columnar table
in `nodes`; `explain` reports refusals with the same plugin calls.
"""
