"""Importers: files of other tools become manifests, with a comment line for each setting that has no counterpart."""
