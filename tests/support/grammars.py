"""Grammars on the tokens of a loaded model: the allowed ones, and texts that fit."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def allowed(matcher: Any, words: int = 16) -> set[int]:
    """Return the allowed next tokens, of a mask with that many words of 32."""
    row = np.full(words, 2**32 - 1, dtype=np.uint32)
    matcher.fill(row)
    return {int(at) for at in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))}


def follow(matcher: Any, tokens: Iterable[int]) -> bool:
    """Take tokens as long as they are allowed; return whether all are."""
    for token in tokens:
        if token not in allowed(matcher):
            return False
        matcher.take(token)
    return True


def encode(loaded: Any, text: str) -> list[int]:
    """Return the tokens of a text."""
    tokens: list[int] = loaded.codec.encode_text(text)
    return tokens
