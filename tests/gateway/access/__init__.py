"""API keys: who may ask gateways for what, and how often."""
