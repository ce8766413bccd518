"""Files, routes and names of earlier systems. Entry points import it, nothing else does."""
