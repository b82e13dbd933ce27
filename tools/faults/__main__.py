"""`python -m tools.faults --seeds 10000 [--first N] [--seed K] [--jobs 2]`: exit code 1 if a seed fails."""

from __future__ import annotations

import sys

from tools.faults.seeds import main

if __name__ == "__main__":
    sys.exit(main())
