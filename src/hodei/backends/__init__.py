"""Places to run jobs: one module or package per kind, each an implementation of `ports.Backend` that passes its conformance
suite.

A backend never decides what runs where, and knows nothing of queues or stores. A vendor's library is imported inside its
own backend only, so that a missing one breaks that backend alone.
"""
