"""The builders of `hodei.testing` under a short module name."""

from hodei.testing.builders import *  # noqa: F403
