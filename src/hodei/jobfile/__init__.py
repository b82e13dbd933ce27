"""Job files: their schema, parsing with every mistake at once, and rendering."""
