"""Printing objects as tables, documents and templates. Reads no store."""
