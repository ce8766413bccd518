"""Memory of an engine: the budget of requests, admission of jobs, and measures under memory pressure."""
