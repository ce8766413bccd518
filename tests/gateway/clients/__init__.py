"""Client libraries of others with their default settings, each against a gateway with a real engine."""
