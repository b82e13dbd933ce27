"""The simulator: drives the real controller with recorded or generated facts. Never imports `runtime` or `backends`."""
