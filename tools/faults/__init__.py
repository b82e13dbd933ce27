"""Fault runs: the real controller and store against backends that break, lie and forget, one seed at a time.

`setup` draws the cluster and its faults, `backend` is the fake backend, `server` drives the controller like a server (and
crashes like one), `audit` checks the invariants after every step, `fault_run` is one complete run. Nothing here imports
`runtime` or `backends`: a fault run tests the core, not the asyncio drivers.
"""
