"""Which engine gets a request: the table and the choice. Pure."""
