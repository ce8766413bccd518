"""HTTP server of the engine: routes, request bodies and streams."""
