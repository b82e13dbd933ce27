"""Job files: schema, parsing with all mistakes at once, and rendering back to what people read."""
