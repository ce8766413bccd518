"""The informers over the store, and the queries that are answered from them."""
