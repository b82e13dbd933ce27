"""MEASURES: `hodei bench engine|server`. Prints figures and ratios from one run on this machine; asserts nothing."""
