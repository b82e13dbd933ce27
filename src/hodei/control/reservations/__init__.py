"""Reserved capacity: windows, overrun enforcement, and the audit of promised starts."""
