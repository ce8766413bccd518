"""The way to clients: what they ask, and how they are answered. Chooses no engine."""
