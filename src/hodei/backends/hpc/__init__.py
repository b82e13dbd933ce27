"""Backends for batch systems: Slurm and PBS.

`ports` defines the protocol of a batch system; `slurm` and `pbs` implement it with commands (argument lists, never a shell)
or REST. `backend` implements `hodei.ports.Backend` on top of the protocol, and `script` builds the batch script of a run.
"""
