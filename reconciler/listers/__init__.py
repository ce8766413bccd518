"""What the reconciler knows of the store: caches, and the questions that are asked of them."""
