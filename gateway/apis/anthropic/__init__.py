"""Anthropic's Messages API: `docs/reference/anthropic.md` says what of it is honoured."""
