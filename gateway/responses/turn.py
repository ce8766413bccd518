"""One request of `/v1/responses`: what it refers to and leaves behind, and the stored items in front of its own. Pure."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import orjson

from gateway.json_limits import decode_members
from gateway.request import Turn
from gateway.responses.database import StoredResponse
from schemas.wire.errors import invalid

# Fields of a response that repeat the request, with their usual values; OpenAI's clients expect all of them.
_ECHOED: Final[dict[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "model": "",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}


class _Fields(msgspec.Struct):
    """Fields that the gateway itself reads; the engine validates the rest."""

    store: bool | None = None
    background: bool | None = None
    stream: msgspec.Raw = msgspec.Raw()
    previous_response_id: str | None = None
    conversation: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_FIELDS: Final = msgspec.json.Decoder(_Fields)


class FinalEvent(msgspec.Struct):
    """The last event of a stream, which has the whole response."""

    response: msgspec.Raw


def read(body: bytes, owner: str, *, has_store: bool) -> Turn:
    """Return the turn. `has_store`: the gateway has a folder for responses.

    Raises:
        RefusedError: its state cannot be as it says.

    """
    try:
        fields = _FIELDS.decode(body)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        if not path:
            return Turn(owner)  # no object, which is refused later
        name = path.rstrip("`")
        raise invalid(f"Invalid '{name}': {reason}.", param=name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Turn(owner)
    if bytes(fields.conversation) not in (b"", b"null"):
        message = "Conversations are not stored; continue a response by 'previous_response_id'."
        raise invalid(f"'conversation' is not supported. {message}", param="conversation")
    wants_store, is_background = fields.store is not False, bool(fields.background)
    if is_background and not wants_store:
        message = "A background response is fetched later; leave 'store' out, or make it true."
        raise invalid(message, param="store")
    if is_background and bytes(fields.stream) == b"true":
        message = "A background response is not streamed; leave 'stream' out, and poll GET /v1/responses/ID."
        raise invalid(message, param="stream")
    is_stored = wants_store and has_store
    return Turn(
        owner,
        previous=fields.previous_response_id or "",
        is_stored=is_stored,
        is_background=is_background,
        # Without its field a response says that it is not stored.
        changes_body=bool(is_stored or fields.previous_response_id or fields.store),
        input=_input_items(bytes(fields.input)) if is_stored else b"",
    )


def resolve(turn: Turn, body: bytes, history: Iterable[StoredResponse]) -> bytes:
    """Return the body with the items of the conversation before its own, and what its response repeats.

    Raises:
        RefusedError: the body is no JSON object.

    """
    members: dict[str, Any] = {**decode_members(body), "store": turn.is_stored}
    if turn.previous:
        arrays = [*(part for record in history for part in (record.input, output_items(record)))]
        arrays.append(_input_items(bytes(members.get("input", b""))))
        members["input"] = msgspec.Raw(join(arrays))
    return msgspec.json.encode(members)


def output_items(record: StoredResponse) -> bytes:
    """Return the output of a stored response, as a JSON array."""
    return bytes(decode_members(record.body).get("output", b"[]"))


def join(arrays: Iterable[bytes]) -> bytes:
    """Return JSON arrays as one."""
    return b"[" + b",".join(filter(None, (array.strip()[1:-1].strip() for array in arrays))) + b"]"


def shown_items(record_id: str, items: bytes) -> list[dict[str, Any]]:
    """Return input items as OpenAI's API shows them: each has a type and an id."""
    name = record_id.removeprefix("resp_")
    shown: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(orjson.loads(items)):
        if isinstance(item, dict):
            id_ = str(item.get("id") or "")
            if not id_ or id_ in shown:
                id_ = f"item_{name}_{number}"
            shown[id_] = {"type": "message", **item, "id": id_}
    return list(shown.values())


def begun(turn: Turn, body: bytes, now_s: int) -> dict[str, Any]:
    """Return a background response before its engine has begun."""
    request = orjson.loads(body)
    return {
        "id": turn.response_id,
        "object": "response",
        "created_at": now_s,
        "status": "queued",
        "background": True,
        "store": True,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **{name: request.get(name) or usual for name, usual in _ECHOED.items()},
    }


def _input_items(given: bytes) -> bytes:
    """Return an input, which is valid JSON, as an array; a text is a message."""
    if given.startswith(b'"'):
        return (
            b'[{"type":"message","role":"user","content":[{"type":"input_text","text":%b}]}]'
            % given
        )
    return given if given.startswith(b"[") else b"[]"  # anything else is refused by the engine
