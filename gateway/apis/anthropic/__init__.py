"""Anthropic's Messages API; `docs/reference/anthropic.md` lists the supported fields."""
