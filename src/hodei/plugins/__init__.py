"""OPINIONS: one file, one policy, with all its points. Pure functions of (member, nodes, view); see `engine.points`.

`registry` finds plugins by name; a new one is a file here and a line there.
"""
