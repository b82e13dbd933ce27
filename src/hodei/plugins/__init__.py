"""Built-in plugins: one file per policy, with all its points. Pure functions of (member, nodes, view); see
`engine.points`.

`registry` finds plugins by name; a new one is a class here, a line there and an entry point in `pyproject.toml`.
"""
