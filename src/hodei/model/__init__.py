"""Frozen values and the functions that belong to them. No I/O, no clock, no randomness.

Every package may import this one; it imports no other.
"""
