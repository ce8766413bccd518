"""Everything that moves one deployment towards its spec: scale, converge (observe, plan, execute), report, write."""
