"""Read-only answers by the engine that decides: why, suggestions, forecasts and what-if."""
