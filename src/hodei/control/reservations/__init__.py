"""Reservations: windows, enforcement of overruns, and the audit of start reservations."""
