"""HTTP connections of clients. Selects no engine."""
