"""Capacity that is ordered and released: what the planner wants (`planner`) and the life of an ordered node (`scaling`)."""
