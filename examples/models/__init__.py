"""Scripts that make model directories."""
