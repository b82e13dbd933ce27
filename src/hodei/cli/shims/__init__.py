"""Slurm's commands as far as fingers and scripts know them, for Hodei: `python -m hodei.cli.shims sbatch …`.

Each reads its options as Slurm does, asks the server, and prints Slurm's columns with Slurm's exit codes. Options that are not
known are refused, not ignored. What a real Slurm prints is compared in `tests/real/slurm/test_shims.py`.
"""
