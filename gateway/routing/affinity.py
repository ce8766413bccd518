"""Session and prefix affinity in bounded memory. Pure; the time is an argument.

It maps a conversation to its endpoint, and a prompt's beginning to the endpoints that have it
cached. Only hashes are stored, salted by this process (Python's SipHash).
"""

from collections.abc import Hashable
from typing import Any

import msgspec

from gateway.request import InferenceRequest
from gateway.routing.table import EngineEndpoint, RoutingQuery, ServedModel

# Sessions, and blocks of prompts, that are remembered at least. An entry takes some 100 bytes, and a dict of so many
# grows within 5 ms.
_ENTRIES = 1 << 17
_MARK_BITS = 32
_MARK_MASK = (1 << _MARK_BITS) - 1
# Processing a shorter prompt again (some 128 tokens) is faster than looking it up.
FIRST_BLOCK = 512
# A longer conversation is known by its prefix only: parsing its opening would take longer than 100
# us.
_MAX_OPENING_BYTES = 1 << 17
# The assumed cached part of a prompt that shares only the cache key.
_SHARED_KEY_PART = 0.25
_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
# How clients lay messages out: their beginning, the user's role, the end of a message, the separator, and beginnings of
# the next message. Quotes in texts are escaped, so no text can imitate them. All other layouts are parsed.
_LAYOUTS = (
    (b'[{"role":"', b'"role":"user"', b"},{", b",", (b'{"role":', b'{"content":')),
    (b'[{"role": "', b'"role": "user"', b"}, {", b", ", (b'{"role": ', b'{"content": ')),
)


class RecentMap:
    """A map of 64-bit hashes to numbers that keeps the last `size` entries put into it, and forgets all but twice as many.

    It is two dicts: the entries since the last turn, and those before it. At a turn the older dict is dropped.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._latest: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def get(self, key: int) -> int:
        """Return the number of the key; 0 if it is missing."""
        return self._latest.get(key, 0) or self._older.get(key, 0)

    def put(self, key: int, value: int) -> None:
        """Store a number, which is not 0."""
        latest = self._latest
        latest[key] = value
        if len(latest) >= self._size:
            self._latest, self._older = {}, latest


class _Message(msgspec.Struct):
    role: Any = None


_MESSAGE = msgspec.json.Decoder(_Message)


class AffinityMemory:
    """The endpoints of sessions and of cached prompt blocks."""

    def __init__(self, *, sessions: int = _ENTRIES, blocks: int = _ENTRIES) -> None:
        """Remember nothing yet; later so many sessions and blocks, or up to twice as many."""
        self._sessions = RecentMap(sessions)
        """Time at which a session ends, in whole seconds of the clock, and mark of its engine."""
        self._blocks = RecentMap(blocks)
        """Marks of engines."""

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
                key = hash((request.model, name, salt)) or 1
                query.session_key = key
                # Many conversations begin alike; only one with an answer has an endpoint.
                if goes_on and (sticky := self._sessions.get(key)) >> _MARK_BITS > now_s:
                    query.sticky_mark = sticky & _MARK_MASK
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
            mark = get(key)
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
            until_s = int(now_s + model.session_s) + 1
            self._sessions.put(query.session_key, until_s << _MARK_BITS | mark)
        put = self._blocks.put
        for _, key in query.blocks:
            put(key, mark)


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
    key, size = hash(cache_scope) or 1, len(prompt)
    blocks, begin, end = [(0, key)], 0, FIRST_BLOCK
    while end <= size:
        key = hash((key, prompt[begin:end])) or 1
        blocks.append((end, key))
        begin, end = end, 2 * end
    return blocks
