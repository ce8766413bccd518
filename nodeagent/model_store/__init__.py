"""The store of models on this node: what uses them, the collection of those that nothing uses, and fetches for people."""
