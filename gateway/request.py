"""What a client asks, as far as the gateway cares. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Names in lower case, in the order they came in."""


@dataclass(slots=True, kw_only=True)
class HttpRequest:
    """One HTTP request."""

    path: str
    query: bytes
    headers: RawHeaders
    request_id: bytes
    """The client's own if it is a sane one, else ours."""
    body: bytes = b""
    """There once all of it came."""

    def header(self, name: bytes) -> bytes:
        """Return a header's value; empty if it is not there."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""


@dataclass(slots=True, kw_only=True)
class InferenceRequest:
    """One request to a model, in OpenAI's words. Never changed; not frozen, which costs as much as reading it."""

    path: str
    """Where the engine takes it."""
    model: str
    body: bytes
    request_id: bytes
    headers: RawHeaders = ()
    """The client's, for routes that go by them."""
    is_streamed: bool = False
    is_resumable: bool = False
    """Whether it is one text of a chat or a completion, as a stream: another engine can go on with it."""
    session: str = ""
    """What the conversation sticks by; empty if nothing tells one from another."""
    prompt: bytes = b""
    """The messages or the prompt, as JSON: prompts that begin alike have read the same tokens."""
    cache_key: str = ""
    """What the client says its prompts have in common; empty if nothing."""
