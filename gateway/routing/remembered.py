"""What a gateway remembers of conversations and prompts, in bounded memory. Pure: time arrives.

Nothing of what clients say is kept, only hashes of it, salted by this process (Python's own SipHash).
"""

from typing import Any

import msgspec

from gateway.asks import Ask
from gateway.routing.cells import Cells
from gateway.routing.table import Model, Target
from gateway.routing.wish import Wish

# What is shorter is read again faster than it is looked for: some 128 tokens.
FIRST_BLOCK = 512
# A longer conversation is known by its prefix alone: looking for its opening would take longer than 100 us.
_LONGEST_TALK = 1 << 17
_64_BITS = (1 << 64) - 1
# What a common cache key says of a prompt that nobody has read, as a part of it.
_KIN = 0.25


class _Message(msgspec.Struct):
    role: Any = None


_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE = msgspec.json.Decoder(_Message)


class Memory:
    """Which engine had a conversation, and which read a prompt's beginning."""

    def __init__(self, *, sessions_log2: int = 18, blocks_log2: int = 17) -> None:
        """Hold a million sessions and a million blocks, unless told otherwise."""
        self._sessions = Cells(sessions_log2)
        self._blocks = Cells(blocks_log2)

    def recall(self, ask: Ask, model: Model, wish: Wish, now_s: float) -> None:
        """Tell the wish what is remembered, and what `keep` will remember it by."""
        if model.session_s:
            if ask.session:
                wish.session = ask.session
                wish.session_key = key = _key((ask.model, ask.session))
                wish.stays = self._sessions.get(key, now_s)
            elif not model.is_sole:
                opening, goes_on = opening_of(ask.prompt)
                if opening:
                    wish.session_key = key = _key((ask.model, opening))
                    # Many conversations begin alike; only what was answered once has a place.
                    if goes_on:
                        wish.stays = self._sessions.get(key, now_s)
        if model.is_prefix_aware and not model.is_sole:
            if len(ask.prompt) < FIRST_BLOCK and not ask.cache_key:
                return
            blocks = blocks_of(ask.prompt, (ask.model, ask.cache_key))
            if not ask.cache_key:
                del blocks[0]
            wish.blocks = blocks
            wish.cached = self._readers(blocks, len(ask.prompt))

    def keep(self, wish: Wish, model: Model, target: Target, now_s: float) -> None:
        """Remember who was asked: what follows may go there, too."""
        if wish.session_key:
            self._sessions.put(wish.session_key, target.mark, now_s + model.session_s)
        for _, key in wish.blocks:
            self._blocks.put(key, target.mark, now_s)

    def _readers(self, blocks: list[tuple[int, int]], size: int) -> list[tuple[int, float]]:
        """Return who has read how much, the longest first: with a block all before it were read."""
        found: list[tuple[int, float]] = []
        for end, key in blocks:
            mark = self._blocks.get(key, 0.0)
            if not mark:
                break
            found.append((mark, end / size if end else _KIN))
        found.reverse()
        return found


def opening_of(prompt: bytes) -> tuple[bytes, bool]:
    """Return the messages up to the first of a user, which stay when a conversation grows, and whether it did.

    `prompt` is JSON. Nothing is returned of what is no list of messages.
    """
    if not prompt.startswith(b"[") or len(prompt) > _LONGEST_TALK or b"{" not in prompt[:64]:
        return b"", False
    try:
        messages = _MESSAGES.decode(prompt)
        for count, message in enumerate(messages, 1):
            if _MESSAGE.decode(message).role == "user":
                return b"\n".join(messages[:count]), count < len(messages)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # The engine says what is wrong with it.
        pass
    return b"", False


def blocks_of(prompt: bytes, kin: tuple[str, str]) -> list[tuple[int, int]]:
    """Return where blocks end and the key of everything up to there, beginning with 0 bytes.

    Each is as long as all before it together, so that there are few. `kin`: prompts that share caches at all.
    """
    key, size = hash(kin) & _64_BITS or 1, len(prompt)
    found, begin, end = [(0, key)], 0, FIRST_BLOCK
    while end <= size:
        key = hash((key, prompt[begin:end])) & _64_BITS or 1
        found.append((end, key))
        begin, end = end, 2 * end
    return found


def _key(what: tuple[object, ...]) -> int:
    return hash(what) & _64_BITS or 1
