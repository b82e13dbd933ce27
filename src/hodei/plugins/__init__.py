"""Built-in plugins: one file per policy, with all its points. Pure functions of (member, nodes, view); see
`engine.points`.

`registry` finds plugins by name; a new one is a class here, and an entry in `extensions.BUILT_IN` and in `pyproject.toml`.
"""
