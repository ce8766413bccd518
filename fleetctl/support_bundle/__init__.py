"""Contents and redaction of support bundles."""
