"""Programs that use the gateway through client libraries of others, in `.venv-clients`. Each gets an address and prints JSON."""
