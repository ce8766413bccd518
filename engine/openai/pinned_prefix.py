"""Pinned prefixes: what a recorded request of an agent says before its user does, as tokens."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from engine.openai import request_body, responses
from engine.openai.input_processor import InputProcessor
from engine.openai.request_body import GenerationRequest
from schemas.prefixes import CHAT_FIELDS, RESPONSES_FIELDS
from schemas.wire import errors
from schemas.wire.engine_config import PrefixFile

# The largest body of a recorded agent has 300 kB.
_MAX_BYTES: Final = 8 << 20


async def encode_prefix(prefix: PrefixFile, processor: InputProcessor) -> tuple[int, ...]:
    """Return the tokens of a recorded request up to where the text of its first user message begins.

    Raises:
        RefusedError: the file is missing or no such request, the model does not support it, or it is too long.

    """
    raw = await asyncio.to_thread(_read_file, prefix.path)
    fields = request_body.read_object(raw)
    first, second = [await processor.tokens(_with_user(fields, text)) for text in ("a", "b")]
    pairs = enumerate(zip(first, second, strict=False))
    length = next((at for at, (one, other) in pairs if one != other), 0)
    if length > prefix.tokens:
        raise errors.invalid(f"{prefix.path.name} has {length} tokens; set its tokens to that")
    return tuple(first[:length])


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise errors.invalid(
            f"{path} cannot be read: {error.strerror}. Copy the recorded prefix there on this Mac"
        ) from error
    if len(raw) > _MAX_BYTES:
        raise errors.invalid(f"{path} has more than {_MAX_BYTES >> 20} MiB; record one request")
    return raw


def _with_user(fields: Mapping[str, Any], text: str) -> GenerationRequest:
    """Return a recorded request whose conversation is one message of a user."""
    is_chat, user = "messages" in fields, {"role": "user", "content": text}
    turns = fields.get("messages" if is_chat else "input")
    if not isinstance(turns, list) or (is_chat and "system" in fields):
        raise errors.invalid(
            "The file must have the list `messages` of Chat Completions or `input` of Responses; record an agent that "
            "uses another API with `fleetctl launch AGENT --record FILE`"
        )
    system: list[Any] = []
    for turn in turns:
        if not isinstance(turn, dict) or turn.get("role") not in ("system", "developer"):
            break
        system.append(turn)
    body = {
        name: fields[name]
        for name in (CHAT_FIELDS if is_chat else RESPONSES_FIELDS)
        if name in fields
    }
    body |= {"model": "prefix", "messages" if is_chat else "input": [*system, user]}
    if is_chat:
        return request_body.parse_chat(orjson.dumps(body))
    return responses.parse(orjson.dumps(body)).chat
