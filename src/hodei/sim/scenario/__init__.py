"""Scenarios: a cluster, jobs and facts in a file, with expectations of the scheduler. `parse` reads the file (keys in
`schema`), `runner` runs it with the real controller, `check` compares, `report` writes the result.
"""
