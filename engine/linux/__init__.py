"""Linux-only parts of the engine; macOS needs none of them."""
