"""`hodei kube`: the commands of the pod scheduler."""

from __future__ import annotations

import sys

from hodei.kube.scheduler.commands import main

if __name__ == "__main__":
    sys.exit(main())
