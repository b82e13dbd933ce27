"""Admission checks, routing to a profile, and escalation of jobs that wait too long."""
