"""Fleet state of the gateway: routing table and API keys, read from the store and kept while it is unreachable."""
