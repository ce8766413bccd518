"""The documentation; `python -m docs.generate` writes the generated parts."""
