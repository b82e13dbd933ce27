"""NOUNS: frozen values and the few functions that belong to them. No I/O, no clock, no randomness.

Everything here may be imported by every room; this room imports none of the others.
"""
