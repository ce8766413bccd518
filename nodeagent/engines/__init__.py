"""Engine processes of this node: start, stop, find, health, logs, golden references. Knows nothing of the store."""
