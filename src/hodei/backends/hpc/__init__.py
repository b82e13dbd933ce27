"""Queueing systems of clusters (Slurm, PBS): one base with the life of a run, and each system's verbs and words.

`queue` names the verbs, `base` leads runs through them, `script` writes what the system is given to run; `slurm*` and
`pbs*` speak to the systems, by commands with plain lists of words (never a shell) or by REST.
"""
