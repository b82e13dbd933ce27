"""Read-only answers: why, suggestions, forecasts and what-if, all computed by the engine that decides."""
