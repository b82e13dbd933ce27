"""REAL LIFE: the asyncio driver of control. Takes facts from everywhere, commits, then acts. Knows no HTTP and no SQL."""
