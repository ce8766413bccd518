"""How much memory requests may take, and what is given up first when it runs short."""
