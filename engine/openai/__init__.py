"""OpenAI's HTTP API as values: from bytes to checked requests, and from results to bytes. No I/O."""
