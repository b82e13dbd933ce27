"""Preemption: candidates, victims and their cost, and the search that tries a placement before any eviction."""
