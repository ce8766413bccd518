"""Translated APIs, with the clients that people use."""
