"""Everything that moves one deployment towards its spec: observe, scale, plan, execute, report."""
