"""Reports of a Mac: runs every registered command, cross-checks the values, hides personal details, writes one file."""
