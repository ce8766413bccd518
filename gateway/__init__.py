"""The stateless OpenAI endpoint: routes requests to endpoints that live as long as their leases."""
