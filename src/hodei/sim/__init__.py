"""PRETENDS: drives the same controller from recorded or invented facts. Never imports `runtime` or `backends`."""
