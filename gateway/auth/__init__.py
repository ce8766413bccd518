"""Who may ask: API keys, what each is good for, and how often. Knows nothing of engines."""
