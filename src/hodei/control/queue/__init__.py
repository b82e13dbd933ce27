"""Queues of pending gangs: priority, multifactor, backfill; and the order over all of them."""
