"""What is in the store, kept in memory and up to date: list, watch, find."""
