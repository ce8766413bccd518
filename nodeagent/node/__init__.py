"""The node: its identity, its registration in the store, its machine's conditions, and its status."""
