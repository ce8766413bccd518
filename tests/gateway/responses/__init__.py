"""Files and batches of clients."""
