"""The golden question answered by one process: the reference for the answer of a group of ranks."""
