"""Conversion between manifests and configuration files of other tools."""
