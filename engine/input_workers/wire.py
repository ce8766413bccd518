"""Messages between the serving process, the fork server and its workers. Pure.

Requests are pickled: the reader is our own child. Answers are JSON and bytes, because what wrote them has read hostile input.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from engine.jobs import MediaInput
from engine.openai.input_tasks import Lane, PreparedPrompt
from schemas.wire.errors import Refusal

_ANSWER: Final = struct.Struct("<II")
_REQUEST: Final = struct.Struct("<dI")
_COMMAND: Final = struct.Struct("<cQ")
_TOKEN_BYTES: Final = array("I").itemsize
READY: Final = b"ready"
"""The fork server's first words: it has the tokenizer, and takes commands."""
COMMAND_BYTES: Final = _COMMAND.size
REPLY_BYTES: Final = 8
REQUEST_HEAD_BYTES: Final = _REQUEST.size
# Beyond any context.
MAX_ANSWER_BYTES: Final = 1 << 30
_REFUSAL_FIELDS: Final = ("status", "type", "param", "code", "retry_after_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of one worker, which the fork server sets in it."""

    memory_bytes: int
    """Most bytes that the worker of huge texts may use beyond what it starts with; the others may use half."""
    niceness: int = 5
    """Niceness of workers with costly input: the serving process goes first."""

    def memory_of(self, lane: Lane) -> int:
        """Return the bytes for the worker of a lane."""
        return self.memory_bytes if lane is Lane.HUGE else self.memory_bytes // 2


def encode_command(name: bytes, argument: int) -> bytes:
    """Return a command to the fork server."""
    return _COMMAND.pack(name, argument)


def decode_command(raw: bytes) -> tuple[bytes, int]:
    """Return the name and the argument of a command."""
    name, argument = _COMMAND.unpack(raw)
    return name, argument


def encode_request(cpu_s: float, task: bytes) -> bytes:
    """Return a request to a worker, which has so many seconds of CPU time for it."""
    return _REQUEST.pack(cpu_s, len(task)) + task


def decode_request_head(raw: bytes | bytearray) -> tuple[float, int]:
    """Return the CPU time, and the number of bytes that follow."""
    cpu_s, size = _REQUEST.unpack(raw)
    return cpu_s, size


def encode_answer(prompts: Sequence[PreparedPrompt]) -> bytes:
    """Return an answer with prompts."""
    head = [
        {
            "tokens": len(prompt.tokens),
            "grammar": prompt.grammar,
            "system_tokens": prompt.system_tokens,
            "second_start": prompt.second_start,
            "images": [
                [image.width, image.height, image.tokens, image.kind, len(image.pixels)]
                for image in prompt.images
            ],
        }
        for prompt in prompts
    ]
    tokens = b"".join(array("I", prompt.tokens).tobytes() for prompt in prompts)
    pixels = b"".join(image.pixels for prompt in prompts for image in prompt.images)
    return _pack({"prompts": head}, tokens + pixels)


def encode_refusal(refusal: Refusal) -> bytes:
    """Return an answer that refuses the request."""
    # A message may quote half a surrogate pair, which UTF-8 cannot spell.
    message = refusal.message.encode(errors="replace").decode()
    fields = {name: getattr(refusal, name) for name in _REFUSAL_FIELDS}
    return _pack({"refusal": fields | {"message": message}}, b"")


def _pack(head: dict[str, Any], tokens: bytes) -> bytes:
    raw = orjson.dumps(head)
    return _ANSWER.pack(len(raw), len(tokens)) + raw + tokens


def answer_size(raw: bytes | bytearray) -> int | None:
    """Return the bytes of the answer that begins so; None if more of it is needed to tell.

    Raises:
        ValueError: no answer is that large.

    """
    if len(raw) < _ANSWER.size:
        return None
    head, tokens = _ANSWER.unpack_from(raw)
    size = _ANSWER.size + int(head) + int(tokens)
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return size


def decode_answer(raw: bytes | bytearray) -> tuple[PreparedPrompt, ...] | Refusal:
    """Return the prompts of a whole answer, or its refusal.

    Raises:
        ValueError: it is none.

    """
    head, _ = _ANSWER.unpack_from(raw)
    fields = orjson.loads(memoryview(raw)[_ANSWER.size : _ANSWER.size + head])
    if "refusal" in fields:
        return Refusal(**fields["refusal"])
    count = sum(field["tokens"] for field in fields["prompts"])
    rest = memoryview(raw)[_ANSWER.size + head :]
    numbers = array("I", bytes(rest[: count * _TOKEN_BYTES]))
    pixels = rest[count * _TOKEN_BYTES :]
    prepared_prompts: list[PreparedPrompt] = []
    start = at = 0
    for field in fields["prompts"]:
        end = start + field["tokens"]
        images: list[MediaInput] = []
        for width, height, tokens, kind, size in field["images"]:
            content = bytes(pixels[at : at + size])
            images.append(
                MediaInput(width=width, height=height, pixels=content, tokens=tokens, kind=kind)
            )
            at += size
        prepared_prompts.append(
            PreparedPrompt(
                tokens=tuple(numbers[start:end]),
                grammar=field["grammar"],
                images=tuple(images),
                system_tokens=field["system_tokens"],
                second_start=field["second_start"],
            )
        )
        start = end
    return tuple(prepared_prompts)
