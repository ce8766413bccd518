"""Naming, selecting, reading, querying and writing objects of the store. Prints no tables."""
