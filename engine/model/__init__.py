"""Model loading: from a folder of files to a model in memory."""
