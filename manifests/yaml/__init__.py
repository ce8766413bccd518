"""YAML text to plain values with their places, and back."""
