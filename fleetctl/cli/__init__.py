"""The command line's frame: verb groups, errors, the terminal and the connection to the store."""
