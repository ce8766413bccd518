"""Hostile and generated requests for `make fuzz-engine`: each is a path, a body and what its client does. Seeded."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Json: TypeAlias = Any

CHAT: Final = "/v1/chat/completions"
_PATHS: Final = (CHAT, CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize")
MODEL: Final = "bench"


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """One request."""

    name: str
    path: str
    body: bytes
    client: Literal["waits", "leaves", "stalls"] = "waits"
    """`leaves` closes the connection after the request; `stalls` sends half of the body and closes it a second later."""


def _chat(name: str, **fields: Json) -> HostileRequest:
    turns = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "messages": turns, "max_tokens": 2} | fields
    return HostileRequest(name, CHAT, json.dumps(body).encode())


def _schema(name: str, schema: Json, **fields: Json) -> HostileRequest:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _chat(name, response_format=form, **fields)


def _turns(count: int, text: str = "x") -> list[Json]:
    return [{"role": "user", "content": text}] * count


def _letters(count: int, at: int) -> str:
    ranges = (f"[{chr(0x400 + 7 * n + at)}-{chr(0x430 + 7 * n + at)}]x" for n in range(count))
    return f"^({'|'.join(ranges)})*{chr(0x4E00 + at)}$"


def _nested(depth: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}}
    return schema


def corpus() -> Iterator[HostileRequest]:
    """Yield the corpus of an independent review, and what was found since."""
    for count in (12, 16, 200):
        parts = [{"type": "string", "pattern": f".*{at}.*"} for at in range(count)]
        yield _schema(f"{count} patterns that meet", {"allOf": parts})
    for count in (4_000, 20_000, 200_000):
        yield _chat(f"{count} messages", messages=_turns(count))
    tokens = json.dumps({"model": MODEL, "prompt": [1] * 2_600_000}).encode()
    yield HostileRequest("2.6 million tokens", "/v1/completions", tokens)
    words = [f"{at:0300}" for at in range(9_990)]
    yield _schema("3 MB of words", {"enum": words})
    yield _schema(
        "a pattern of many states",
        {"type": "string", "pattern": "^((a{100}){100}){100}$"},
        max_tokens=200,
    )
    names: list[dict[str, Any]] = [
        {"patternProperties": {_letters(150, at): {}}} for at in range(16)
    ]
    yield _schema("names that meet", {"type": "object", "allOf": names})
    for pattern in ("(a|a)*$", "(a+)+$", "(.*a){25}", "(a|b)*a(a|b){20}", ".{0,1000}x.{0,1000}y"):
        yield _schema(f"pattern {pattern}", {"type": "string", "pattern": pattern})
    yield _schema("a recursion", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
    yield _schema("many items", {"type": "array", "minItems": 10**6})
    yield _schema("nested 60 times", _nested(60))
    yield _schema("nested 400 times", _nested(400))
    for size in (60_000, 1_000_000, 7_000_000):
        yield _chat(f"{size} letters", messages=_turns(1, "a" * size))
        yield _chat(f"{size} characters", messages=_turns(1, "\u6f22\U0001f99c" * (size // 7)))
        prompt = json.dumps({"model": MODEL, "prompt": " x" * (size // 2)}).encode()
        yield HostileRequest(f"{size} bytes of words, left", "/v1/completions", prompt, "leaves")
        yield HostileRequest(f"{size} bytes, stalled", "/v1/completions", prompt, "stalls")
    function = {"name": "f", "parameters": _nested(20)}
    tools = [{"type": "function", "function": function | {"name": f"f{at}"}} for at in range(120)]
    yield _chat("120 tools", tools=tools, tool_choice="required")
    yield _chat("deep metadata", metadata={"a": "b" * 100_000})
    yield HostileRequest("brackets", CHAT, b"[" * 1_000_000)
    yield HostileRequest("no UTF-8", CHAT, b'{"model": "\xff\xfe"}')
    texts = json.dumps({"model": MODEL, "prompt": ["x"] * 1_000, "n": 8}).encode()
    yield HostileRequest("8,000 choices", "/v1/completions", texts)
    inputs = json.dumps({"model": MODEL, "input": ["word " * 50] * 2_000}).encode()
    yield HostileRequest("2,000 inputs", "/v1/embeddings", inputs)


_WORDS: Final = (
    *("", "hi", "a" * 300, "<|im_start|>system"),
    *("\u6f22\u5b57 \U0001f99c", "\x00", "{{ 7*7 }}", "\n" * 50),
)
_VALUES: Final[tuple[Json, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 7, 1e-9, 0.5, 1e308, 2**31, 2**63, "", "x", [], {}, [1]),
    *(["a"], {"a": 1}, [[]], [None], {"type": "json_object"}, {"type": "text"}),
    *("auto", "required", "none", "low"),
)
_FIELDS: Final = [
    "max_tokens",
    "n",
    "stop",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "response_format",
    "reasoning_effort",
    "user",
    "metadata",
    "cache_salt",
    "min_tokens",
    "ignore_eos",
    "guided_regex",
    "guided_choice",
    "guided_json",
    "echo",
    "chat_template_kwargs",
    "messages",
    "prompt",
    "input",
    "best_of",
    "xtc_probability",
    "name",
    "fleet",
]
_KEYWORDS: Final[tuple[Callable[[random.Random, Json], Json], ...]] = (
    lambda dice, inner: {"type": "array", "items": inner, "maxItems": dice.randrange(5)},
    lambda dice, inner: {"type": "object", "properties": {f"p{dice.randrange(3)}": inner}},
    lambda _, inner: {"anyOf": [inner, {"type": "null"}]},
    lambda _, inner: {"allOf": [inner, inner]},
    lambda dice, _: {
        "type": "string",
        "pattern": dice.choice(["a+", "[0-9]{1,9}", "(ab|c)*", "(", "\\w{3}"]),
    },
    lambda dice, _: {
        "type": "string",
        "format": dice.choice(["date", "uuid", "email", "ipv4", "zz"]),
    },
    lambda dice, _: {
        "type": "integer",
        "minimum": dice.randrange(-9, 9),
        "maximum": dice.randrange(9),
    },
    lambda dice, _: {"enum": [dice.choice(_VALUES) for _ in range(dice.randrange(4))]},
    lambda dice, inner: {dice.choice(["not", "if", "contains", "$ref", "const"]): inner},
)


def generated(seed: int) -> Iterator[HostileRequest]:
    """Yield requests without an end: valid ones, nearly valid ones, and bytes that are no JSON."""
    dice = random.Random(seed)
    while True:
        path = dice.choice(_PATHS)
        body: dict[str, Json] = {"model": MODEL, "max_tokens": dice.randrange(1, 5)}
        body |= _prompt(path, dice)
        for _ in range(dice.choice((0, 0, 1, 2, 3))):
            body[dice.choice(_FIELDS)] = dice.choice(_VALUES)
        if path == CHAT and dice.random() < 0.3:
            form = {"name": "x", "schema": _random_schema(dice, 4)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        raw = json.dumps(body).encode()
        if dice.random() < 0.1:
            at = dice.randrange(len(raw))
            raw = raw[:at] + dice.randbytes(3) + raw[at + dice.randrange(5) :]
        client: Literal["waits", "leaves"] = "leaves" if dice.random() < 0.05 else "waits"
        yield HostileRequest("generated", path, raw, client)


def _prompt(path: str, dice: random.Random) -> dict[str, Json]:
    text = dice.choice(_WORDS) * dice.choice((1, 1, 1, 20, 2_000))
    roles = ("user", "user", "assistant", "system", "tool", "developer", "nobody")
    turns = [
        {
            "role": dice.choice(roles),
            "content": dice.choice((text, text, None, [{"type": "text", "text": text}])),
        }
        for _ in range(dice.choice((1, 1, 2, 5, 100)))
    ]
    if path in (CHAT, "/tokenize"):
        return {"messages": turns}
    if path == "/v1/completions":
        return {"prompt": dice.choice((text, [text, text], [1, 2, 3], [dice.randrange(600)] * 50))}
    return {"input": text}


def _random_schema(dice: random.Random, depth: int) -> Json:
    inner = {"type": "string"} if depth == 0 else _random_schema(dice, depth - 1)
    return dice.choice(_KEYWORDS)(dice, inner)
