"""OpenAI's shapes: from bytes to checked values, and from values to bytes. Sends and waits for nothing."""
