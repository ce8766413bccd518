"""Response translation is well formed for any chunks: one end or one error, and nothing after it."""

from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis.adapter import ResponseTranslator
from gateway.apis.anthropic.response_translator import MessageTranslator
from gateway.apis.ollama.response_translator import GenerationTranslator
from gateway.errors import interrupted
from machinery.clock import SystemClock
from tests.support.gateway_api_scripts import DONE, chunk, totals
from tests.support.sampling import samples

CALL = st.builds(
    lambda index, id_, name, arguments: {
        "index": index, "id": id_, "function": {"name": name, "arguments": arguments},
    },
    st.integers(0, 2),
    st.sampled_from([None, "call_a"]),
    st.sampled_from([None, "f"]),
    st.sampled_from([None, "", '{"a":', " 1}", "{}"]),
)  # fmt: skip
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": st.one_of(st.none(), st.text(max_size=4)),
        "reasoning_content": st.one_of(st.none(), st.text(max_size=4)),
        "tool_calls": st.lists(CALL, max_size=2),
    },
)
FINISH = st.sampled_from([None, None, "stop", "length", "tool_calls"])
EVENT = st.one_of(
    st.builds(lambda delta, finish: chunk(delta, finish_reason=finish), DELTA, FINISH),
    st.builds(lambda delta, finish: chunk(delta, finish_reason=finish), DELTA, FINISH),
    st.sampled_from(
        [totals(), DONE, b": working on it\n\n", b'data: {"error": {"message": "no"}}\n\n',
         b"data: \xff{\n\n", b"data: []\n\n", b'data: {"choices": 7}\n\n'],
    ),
)  # fmt: skip
# One read has one event or more.
PIECES = st.lists(st.lists(EVENT, min_size=1, max_size=3).map(b"".join), max_size=8)


def told(translator: ResponseTranslator, pieces: list[bytes], *, breaks: bool) -> bytes:
    out = b"".join(translator.events(piece) for piece in pieces)
    return out + (translator.broken(interrupted("it died")) if breaks else translator.end())


@settings(max_examples=samples(150))
@given(pieces=PIECES, is_chat=st.booleans(), breaks=st.booleans())
def test_lines(pieces: list[bytes], *, is_chat: bool, breaks: bool) -> None:
    translator = GenerationTranslator("m", SystemClock(), is_chat=is_chat)
    lines = told(translator, pieces, breaks=breaks).splitlines()
    *before, last = [orjson.loads(line) for line in lines]
    assert ("error" in last) != bool(last.get("done"))
    for one in before:
        assert one["done"] is False
        assert one["model"] == "m"
        said = one["message"] if is_chat else one
        assert said.get("content" if is_chat else "response") is not None
        for call in said.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], dict)


@settings(max_examples=samples(150))
@given(pieces=PIECES, breaks=st.booleans())
def test_events(pieces: list[bytes], *, breaks: bool) -> None:
    check(told(MessageTranslator("m", 9, shows_thoughts=True), pieces, breaks=breaks))


def check(out: bytes) -> None:
    """Check the order of events that Anthropic documents."""
    assert out.endswith(b"\n\n")
    events: list[dict[str, Any]] = []
    for block in out[:-2].split(b"\n\n"):
        kind, data = block.split(b"\n")
        body = orjson.loads(data.removeprefix(b"data: "))
        assert kind == b"event: " + body["type"].encode()
        events.append(body)
    events = [event for event in events if event["type"] != "ping"]
    kinds = [event["type"] for event in events]
    assert kinds[-1] in ("message_stop", "error")
    assert kinds.count("message_stop") + kinds.count("error") == 1
    if kinds[-1] == "message_stop":
        assert kinds[-2] == "message_delta"
        assert kinds[0] == "message_start"
        events = events[:-1]
    if kinds[0] == "error":
        return
    assert kinds[0] == "message_start"
    assert kinds.count("message_start") == 1
    opened, at = -1, None
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            assert at is None
            opened += 1
            at = opened
        assert event["index"] == at
        if event["type"] == "content_block_stop":
            at = None
    if kinds[-1] == "message_stop":
        assert at is None


@settings(max_examples=samples(30))
@given(PIECES.filter(bool))
def test_content_is_sent_once(pieces: list[bytes]) -> None:
    texts = ["a", "bc", "", "d"]
    stream = [chunk({"content": text}) for text in texts]
    stream += [chunk({}, finish_reason="stop"), totals() + DONE, *pieces]
    translator = MessageTranslator("m", 9, shows_thoughts=True)
    out = b"".join(translator.events(piece) for piece in stream) + translator.end()
    bodies = [orjson.loads(line[6:]) for line in out.splitlines() if line.startswith(b"data:")]
    found = [body["delta"].get("text", "") for body in bodies if "delta" in body]
    assert "".join(found) == "abcd"
    assert bodies[-1] == {"type": "message_stop"}
    lines = GenerationTranslator("m", SystemClock(), is_chat=True)
    spoken = (b"".join(lines.events(piece) for piece in stream) + lines.end()).splitlines()
    assert "".join(orjson.loads(line)["message"]["content"] for line in spoken) == "abcd"
