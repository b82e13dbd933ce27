"""Sections of a job file: for each its schema, its parser and its renderer."""
