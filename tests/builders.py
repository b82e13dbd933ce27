"""The builders of `hodei.testing`, by a short name."""

from hodei.testing.builders import *  # noqa: F403
