"""Engine processes of this node: start, find, stop, health, logs, golden references. Knows nothing of the store."""
