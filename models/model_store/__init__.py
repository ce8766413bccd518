"""The models on this machine's disk: content-addressed files, and folders that the engine reads."""
