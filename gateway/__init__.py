"""The gateway: a stateless OpenAI-compatible endpoint that routes requests to leased engine endpoints."""
