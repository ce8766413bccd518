"""Keys and values of prompts that were read before, by blocks of tokens, within a budget of bytes."""
