"""`python -m engine.golden`: the answer by which a group's is checked, made by one process."""
