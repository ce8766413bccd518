"""Session and prefix affinity in bounded memory. Pure; the time is an argument.

It maps a conversation to its endpoint, and a prompt's beginning to the endpoints that have it
cached. Only hashes are stored, salted by this process (Python's SipHash).
"""

import mmap
import sys
from collections.abc import Hashable
from typing import Any

import msgspec

from gateway.request import InferenceRequest
from gateway.routing.table import EngineEndpoint, RoutingQuery, ServedModel

_WAYS = 8
_WAY_SHIFT = 61
"""The upper bits of a key select the way of its set that is checked first; mostly the key is there."""
_FIRST_SETS_LOG2 = 8
# Sets that are divided last in a round have twice as many on average; of eight, more would be full now and then.
_ENTRIES_A_SET = 1
_TICKS = 8
"""Ticks per second; 32 bits of them are 17 years."""
# Processing a shorter prompt again (some 128 tokens) is faster than looking it up.
FIRST_BLOCK = 512
# A longer conversation is known by its prefix only: parsing its opening would take longer than 100
# us.
_MAX_OPENING_BYTES = 1 << 17
_64_BITS = (1 << 64) - 1
# The assumed cached part of a prompt that shares only the cache key.
_SHARED_KEY_PART = 0.25
_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
# How clients lay messages out: their beginning, the user's role, the end of a message, the separator, and beginnings of
# the next message. Quotes in texts are escaped, so no text can imitate them. All other layouts are parsed.
_LAYOUTS = (
    (b'[{"role":"', b'"role":"user"', b"},{", b",", (b'{"role":', b'{"content":')),
    (b'[{"role": "', b'"role": "user"', b"}, {", b", ", (b'{"role": ', b'{"content": ')),
)


class BoundedMap:
    """A map of bounded size from 64-bit keys, never 0, to marks of engines.

    The oldest entry of a full set is replaced.

    Built like a CPU cache: each set has eight ways of 16 bytes. A Python dict takes 140 bytes for
    an entry, and growing one with half a million entries stops the process for tens of
    milliseconds. This map grows by one set at a time, as in linear hashing (Litwin 1980): keys are
    random, so without it ten thousand of them would touch nearly all pages. Unused pages take no memory.
    """

    def __init__(self, sets_log2: int) -> None:
        """`sets_log2`: of the largest size; 18 means two million entries, 32 MB when full."""
        size = _WAYS * 8 << sets_log2
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._keys = memoryview(mmap.mmap(-1, size, flags=flags)).cast("Q")
        # The upper half is the time in ticks, the lower half the mark, so the smallest value is the
        # oldest.
        self._values = memoryview(mmap.mmap(-1, size, flags=flags)).cast("Q")
        self._mask = (1 << min(sets_log2, _FIRST_SETS_LOG2)) - 1
        """Selects the set of a key that is not yet divided."""
        self._divided = 0
        """Sets below it are divided in this round: one more bit of a key selects between both parts."""
        self._limit = 1 << sets_log2
        self._entries = 0
        self._room = _ENTRIES_A_SET * self.sets if self.sets < self._limit else sys.maxsize
        """With more entries, the map grows by one set."""

    @property
    def sets(self) -> int:
        """The present number of sets."""
        return self._mask + 1 + self._divided

    def get(self, key: int, not_before_s: float) -> int:
        """Return the mark of the key; 0 if it is missing or older than that time."""
        base = key & self._mask
        if base < self._divided:
            base = key & (2 * self._mask + 1)
        base *= _WAYS
        place = base + (key >> _WAY_SHIFT)
        if self._keys[place] != key:
            ways = self._keys[base : base + _WAYS].tolist()
            if key not in ways:
                return 0
            place = base + ways.index(key)
        value = self._values[place]
        return value & 0xFFFFFFFF if value >> 32 >= int(not_before_s * _TICKS) else 0

    def put(self, key: int, mark: int, when_s: float) -> None:
        """Store the mark; the smallest `when_s` is replaced first."""
        base = key & self._mask
        if base < self._divided:
            base = key & (2 * self._mask + 1)
        base *= _WAYS
        place = base + (key >> _WAY_SHIFT)
        value = int(when_s * _TICKS) << 32 | mark
        if self._keys[place] == key:
            self._values[place] = value
            return
        place = base + self._way(base, key)
        is_more = not self._keys[place]
        self._keys[place], self._values[place] = key, value
        if is_more:
            self._entries += 1
            if self._entries > self._room:
                self._divide()

    def _divide(self) -> None:
        """Divide the next set: its keys with one more bit move to a new set, each to the same way."""
        size, first = self._mask + 1, self._divided * _WAYS
        keys, values, moved = self._keys, self._values, size * _WAYS
        for place, key in enumerate(keys[first : first + _WAYS].tolist(), first):
            if key & size:
                keys[place + moved], values[place + moved] = key, values[place]
                keys[place] = values[place] = 0
        self._divided += 1
        self._room += _ENTRIES_A_SET
        if self._divided == size:
            self._mask, self._divided = 2 * size - 1, 0
            if 2 * size == self._limit:
                self._room = sys.maxsize

    def _way(self, base: int, key: int) -> int:
        """Return the way that holds the key, or that it may take."""
        ways = self._keys[base : base + _WAYS].tolist()
        if key in ways:
            return ways.index(key)
        if not ways[key >> _WAY_SHIFT]:
            return key >> _WAY_SHIFT
        if 0 in ways:
            return ways.index(0)
        values = self._values[base : base + _WAYS].tolist()
        return values.index(min(values))


class _Message(msgspec.Struct):
    role: Any = None


_MESSAGE = msgspec.json.Decoder(_Message)


class AffinityMemory:
    """The endpoints of sessions and of cached prompt blocks."""

    def __init__(self, *, sessions_log2: int = 18, blocks_log2: int = 17) -> None:
        """Allocate the maps: a million sessions and a million blocks by default."""
        self._sessions = BoundedMap(sessions_log2)
        self._blocks = BoundedMap(blocks_log2)

    def recall(
        self, request: InferenceRequest, model: ServedModel, query: RoutingQuery, now_s: float
    ) -> None:
        """Fill in the affinity fields of the query."""
        has_choice, prompt, salt = (
            not model.has_one_endpoint,
            bytes(request.prompt),
            request.key_salt,
        )
        if model.session_s:
            session = query.session = request.session
            opening, goes_on = b"", True
            if has_choice and not session:
                opening, goes_on = opening_of(prompt)
            if name := session or opening:
                key = hash((request.model, name, salt)) & _64_BITS or 1
                query.session_key = key
                # Many conversations begin alike; only one with an answer has an endpoint.
                if goes_on:
                    query.sticky_mark = self._sessions.get(key, now_s)
        size, cache_key = len(prompt), request.cache_key
        if not (has_choice and model.is_prefix_aware and (size >= FIRST_BLOCK or cache_key)):
            return
        query.blocks = blocks = blocks_of(
            prompt, (request.model, cache_key, request.cache_salt, salt)
        )
        if not cache_key:
            del blocks[0]
        get = self._blocks.get
        found: list[tuple[int, float]] = []
        # A block is cached only with all blocks before it.
        for end, key in blocks:
            mark = get(key, 0.0)
            if not mark:
                break
            found.append((mark, end / size if end else _SHARED_KEY_PART))
        if len(found) > 1:
            found.reverse()
        query.cached = found

    def remember(
        self, query: RoutingQuery, model: ServedModel, endpoint: EngineEndpoint, now_s: float
    ) -> None:
        """Remember the endpoint for the query's session and prompt."""
        mark = endpoint.mark
        if query.session_key:
            self._sessions.put(query.session_key, mark, now_s + model.session_s)
        put = self._blocks.put
        for _, key in query.blocks:
            put(key, mark, now_s)


def opening_of(prompt: bytes) -> tuple[bytes, bool]:
    """Return the messages up to the user's first, which stay as a conversation grows, and whether it has grown.

    `prompt` is JSON. Returns nothing for anything but a list of messages.
    """
    if len(prompt) > _MAX_OPENING_BYTES:
        return b"", False
    separator = b","
    for begin, user, end, between, following in _LAYOUTS:
        if prompt.startswith(begin):
            separator = between
            at = prompt.find(user)
            to = prompt.find(end, at) if at > 0 else 0
            if to < 0 and prompt.endswith(b"}]"):
                return prompt[:-1], False
            if to > 0 and prompt.startswith(following, to + len(end) - 1):
                return prompt[: to + 1], True
            break
    if not prompt.startswith(b"[") or b"{" not in prompt[:64]:
        return b"", False
    try:
        messages = _MESSAGES.decode(prompt)
        for count, message in enumerate(messages, 1):
            if _MESSAGE.decode(message).role == "user":
                return b"[" + separator.join(messages[:count]), count < len(messages)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # The engine reports the error.
        pass
    return b"", False


def blocks_of(prompt: bytes, cache_scope: Hashable) -> list[tuple[int, int]]:
    """Return the end and the key of each block of the prompt, beginning with an empty one.

    Each block is as long as all before it together, so there are few. Prompts with
    equal scopes share caches.
    """
    key, size = hash(cache_scope) & _64_BITS or 1, len(prompt)
    blocks, begin, end = [(0, key)], 0, FIRST_BLOCK
    while end <= size:
        key = hash((key, prompt[begin:end])) & _64_BITS or 1
        blocks.append((end, key))
        begin, end = end, 2 * end
    return blocks
