"""From a folder to a model in memory."""
