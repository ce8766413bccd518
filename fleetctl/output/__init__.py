"""Objects as tables, documents and templates."""
