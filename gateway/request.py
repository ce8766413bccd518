"""Requests of clients, as far as the gateway reads them. Values only.

They are structs of msgspec, whose creation costs a fifth of a dataclass's. Their types are not checked.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from machinery.clock import NEVER
from schemas.wire import headers as wire_headers

_TIMEOUT = wire_headers.REQUEST_TIMEOUT.encode()

RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Header names in lower case and values, in the order of arrival."""


class HttpRequest(msgspec.Struct, kw_only=True):
    """One HTTP request."""

    path: str
    query: bytes = b""
    headers: RawHeaders
    fields: Mapping[bytes, bytes]
    """The last value of each header."""
    request_id: bytes = b""
    """The client's id if it is valid, else a generated one."""
    body: bytes = b""
    """Empty until all of the body has arrived."""

    def timeout_s(self) -> float:
        """Return the client's timeout in seconds; infinite if it sent none.

        Raises:
            RefusedError: its header is invalid.

        """
        text = self.fields.get(_TIMEOUT)
        return NEVER if text is None else wire_headers.parse_timeout(text.decode("latin-1"))


JSON = b"application/json"
"""The content type of all bodies but forms."""


class InferenceRequest(msgspec.Struct, kw_only=True):
    """One request to a model, in OpenAI's format. Never changed but for `key_salt`, and by `canonicalize`."""

    path: str
    """Path of the request to the engine."""
    model: str
    body: bytes
    content_type: bytes = JSON
    """That of `body`; a form's has its boundary."""
    request_id: bytes
    headers: RawHeaders = ()
    """Headers of the client, for header rules of routes."""
    is_streamed: bool = False
    is_resumable: bool = False
    """True for generations: another engine can continue them."""
    choices: int = 1
    """Choices of the answer (`n`)."""
    session: str = ""
    """Key for session affinity; empty if the request has none."""
    prompt: bytes | msgspec.Raw = b""
    """The messages or the prompt as JSON; a part of the body is no copy of it, because streams live long. Prompts with equal beginnings and salts share cached tokens."""
    cache_key: str = ""
    """The client's `prompt_cache_key`; empty if it sent none."""
    cache_salt: str = ""
    """The client's `cache_salt`: prompts with different values share no cached tokens. Empty if it sent none."""
    timeout_s: float = NEVER
    """The client's own timeout, from the arrival of the request."""
    keep_alive_s: float | None = None
    """Seconds for which the client wants the model to stay loaded; None if it says nothing."""
    is_unload: bool = False
    """True if the client only says that it needs the model no longer: it is answered without an engine."""
    key_salt: bytes = b""
    """The salt of the client's API key, which engines combine with `cache_salt`; empty for the one shared cache."""


class Turn(msgspec.Struct):
    """The state of one request for a response: what it refers to and leaves behind."""

    owner: str
    previous: str = ""
    """The id of the response that it continues; empty if it sends its whole input."""
    is_stored: bool = False
    is_background: bool = False
    changes_body: bool = False
    """True if an engine needs another body than the client sent."""
    input: bytes = b""
    """Its own input items, as a JSON array; empty for a response that is not stored."""
    response_id: str = ""
    """The id that a background response has had since before its engine began; empty: the engine's."""
