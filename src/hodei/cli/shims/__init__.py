"""Commands of Slurm for Hodei: `python -m hodei.cli.shims sbatch …`.

Each parses its options as Slurm does, calls the server, and prints Slurm's columns with Slurm's exit codes. Unknown options are
refused, not ignored. `tests/real/slurm/test_shims.py` compares them with a real Slurm.
"""
