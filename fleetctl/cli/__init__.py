"""The frame of the command line: verb groups, shared options, errors, the terminal and the connection to the store."""
