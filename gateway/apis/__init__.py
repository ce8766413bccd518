"""API adapters: OpenAI's API as it is, and Anthropic's and Ollama's translated to and from it. No I/O."""
