"""A map of bounded size from 64-bit keys to marks of engines; the oldest make room. Pure: time arrives.

Built like a processor's cache: eight places for each of the sets that a key may be in, 16 bytes a place. Python's own
dict takes 140 bytes for the same, and doubling one of half a million entries stops the process for tens of milliseconds; here nothing
ever grows, and the pages of what was never used are not there at all.

What a gateway remembers of conversations and prompts, in bounded memory. Pure: time arrives.

Nothing of what clients say is kept, only hashes of it, salted by this process (Python's own SipHash).
"""

import mmap
from typing import Any

import msgspec

from gateway.request import InferenceRequest
from gateway.routing.query import RoutingQuery
from gateway.routing.table import EngineEndpoint, ServedModel

_WAYS = 8
_OWN = 61
"""A key's upper bits say which place of its set is looked at first: mostly it is there."""
_TICKS = 8
"""Ticks a second; 32 bits of them are 17 years."""


class BoundedMap:
    """Keys are never 0; a key that was not seen for long may be forgotten for another of the same set."""

    def __init__(self, sets_log2: int) -> None:
        """`sets_log2`: 18 is two million places, 32 MB once all are used."""
        size = _WAYS * 8 << sets_log2
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._keys = memoryview(mmap.mmap(-1, size, flags=flags)).cast("Q")
        # The upper half is when in ticks, the lower the mark: so the least is the oldest.
        self._values = memoryview(mmap.mmap(-1, size, flags=flags)).cast("Q")
        self._mask = (1 << sets_log2) - 1

    def get(self, key: int, not_before_s: float) -> int:
        """Return the mark under the key; 0 if there is none, or one of before that time."""
        base = (key & self._mask) * _WAYS
        place = base + (key >> _OWN)
        if self._keys[place] != key:
            ways = self._keys[base : base + _WAYS].tolist()
            if key not in ways:
                return 0
            place = base + ways.index(key)
        value = self._values[place]
        return value & 0xFFFFFFFF if value >> 32 >= int(not_before_s * _TICKS) else 0

    def put(self, key: int, mark: int, when_s: float) -> None:
        """Note the mark; `when_s` decides who is forgotten first."""
        base = (key & self._mask) * _WAYS
        place = base + (key >> _OWN)
        if self._keys[place] != key:
            place = base + self._way(base, key)
            self._keys[place] = key
        self._values[place] = int(when_s * _TICKS) << 32 | mark

    def _way(self, base: int, key: int) -> int:
        """Return which place of the set is the key's, or becomes its."""
        ways = self._keys[base : base + _WAYS].tolist()
        if key in ways:
            return ways.index(key)
        if not ways[key >> _OWN]:
            return key >> _OWN
        if 0 in ways:
            return ways.index(0)
        values = self._values[base : base + _WAYS].tolist()
        return values.index(min(values))


# What is shorter is read again faster than it is looked for: some 128 tokens.
FIRST_BLOCK = 512
# A longer conversation is known by its prefix alone: looking for its opening would take longer than 100 us.
_LONGEST_TALK = 1 << 17
_64_BITS = (1 << 64) - 1
# What a common cache key says of a prompt that nobody has read, as a part of it.
_SHARED_KEY_PART = 0.25


class _Message(msgspec.Struct):
    role: Any = None


_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE = msgspec.json.Decoder(_Message)


class AffinityMemory:
    """Which engine had a conversation, and which read a prompt's beginning."""

    def __init__(self, *, sessions_log2: int = 18, blocks_log2: int = 17) -> None:
        """Hold a million sessions and a million blocks, unless told otherwise."""
        self._sessions = BoundedMap(sessions_log2)
        self._blocks = BoundedMap(blocks_log2)

    def recall(
        self, ask: InferenceRequest, model: ServedModel, wish: RoutingQuery, now_s: float
    ) -> None:
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

    def keep(
        self, wish: RoutingQuery, model: ServedModel, target: EngineEndpoint, now_s: float
    ) -> None:
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
            found.append((mark, end / size if end else _SHARED_KEY_PART))
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
