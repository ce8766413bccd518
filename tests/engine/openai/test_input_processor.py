"""Continued answers: replayed tokens, refusals, and text that equals an uninterrupted answer to the byte."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.jobs import Job, SamplingParams, TokenOutput
from engine.openai import input_processor
from engine.openai.resume_point import ResumePoint
from engine.text.formats.answer import AnswerContext
from engine.text.formats.registry import PLAIN
from engine.text.output_parser import OutputParser
from engine.text.reasoning import ThinkingMarkers, ThinkingState
from engine.text.spans import StopMatcher
from gateway.forwarding.resume_log import ResumeLog
from machinery import engine_link
from schemas.wire.errors import RefusedError
from tests.support.byte_detokenizer import ByteDetokenizer
from tests.support.engine_process import Engine
from tests.support.gateway_resume_engine import DONE, check
from tests.support.link_client import RecordedReply, ask

END = 0
HEADERS = {"x-fleet-resumable": "1"}
KNOWN = ("seed", "prompt", "id", "created", "cached_tokens")


def new_parser(*stops: str) -> OutputParser:
    return OutputParser(detokenizer=ByteDetokenizer(), stops=StopMatcher(stops))


def feed(parser: OutputParser, tokens: list[int], limit: int) -> tuple[list[int], str]:
    """Feed tokens until the answer is over; return the tokens that were taken, and the text."""
    shown = ""
    for token in tokens:
        if parser.is_over:
            break
        last = len(parser.tokens) + 1 == limit
        finish: Any = "stop" if token == END else "length" if last else None
        shown += parser.take(TokenOutput(job_id=1, token=token, finish=finish)).content
    return parser.tokens, shown


def job(tokens: list[int], limit: int) -> Job:
    sampling = SamplingParams(temperature=0)
    return Job(id=1, prompt=(1,), max_tokens=limit, sampling=sampling, emitted=tuple(tokens))


@given(
    text=st.text(alphabet="ab<é世🌍\0", min_size=1, max_size=12),
    stops=st.lists(st.sampled_from(["<a", "b<", "世", "éa", "ab"]), max_size=2),
    limit=st.integers(1, 40),
)
def test_a_text_cut_at_any_token_continues_equally(text: str, stops: list[str], limit: int) -> None:
    tokens = [*text.encode(), END][:limit]
    whole = new_parser(*stops)
    taken, shown = feed(whole, tokens, limit)
    for cut in range(len(taken) + 1):
        first, second = new_parser(*stops), new_parser(*stops)
        _, begun = feed(first, tokens[:cut], limit)
        input_processor.replay_tokens(second, job(tokens[:cut], limit), end_tokens=(END,))
        assert second.is_over == first.is_over
        _, rest = feed(second, tokens[cut:], limit)
        assert begun + rest == shown
        assert second.finish == whole.finish
        assert second.tokens == taken


def test_reasoning_tokens_are_counted_in_both_engines() -> None:
    markers = ThinkingMarkers(start="<t>", end="</t>")
    tokens = list(b"<t>ab</t>c")
    for cut in range(len(tokens)):
        context = AnswerContext(thinking=markers, state=ThinkingState.FREE, tools=None)
        answer = PLAIN.new_parser(context)
        parser = OutputParser(detokenizer=ByteDetokenizer(), stops=StopMatcher(()), answer=answer)
        input_processor.replay_tokens(parser, job(tokens[:cut], 99), end_tokens=(END,))
        feed(parser, tokens[cut:], 99)
        assert parser.reasoning_tokens == len(">ab</t>")


def refusal(tokens: tuple[int, ...] = (), digest: str = "m") -> Any:
    resumed = ResumePoint(
        tokens=list(tokens), seed=1, prompt=digest, id="x", created=1, cached_tokens=0
    )
    with pytest.raises(RefusedError) as caught:
        input_processor.resume_job(job([], 3), resumed, 0, "m", vocab_size=10)
    return caught.value.refusal


def test_a_foreign_resume_point_is_refused() -> None:
    other = refusal(digest="other")
    assert (other.status, other.code, other.param) == (409, "prompt_differs", "fleet.prompt")
    assert refusal((1, 2, 3, 4)).param == "fleet.tokens"
    assert refusal((10,)).param == "fleet.tokens"


def test_a_digest_identifies_tokens() -> None:
    assert input_processor.prompt_digest((1, 2)) == input_processor.prompt_digest([1, 2])
    assert (
        len(
            {input_processor.prompt_digest(one) for one in ((), (1,), (2,), (1, 2), (2, 1), (258,))}
        )
        == 6
    )


# Against an engine.

Chunk = dict[str, Any]
PROMPT = {"messages": [{"role": "user", "content": "héllo"}], "max_tokens": 24, "stream": True}
CHAT = PROMPT | {"stream_options": {"include_usage": True}}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    # At this temperature most tokens are parts of characters. Penalties depend on emitted tokens.
    {"temperature": 2, "seed": 7, "frequency_penalty": 1.5, "presence_penalty": 1},
    {"temperature": 0.8, "seed": -1, "top_p": 0.9, "repetition_penalty": 1.3},
]


def post(engine: Engine, path: str, **fields: Any) -> RecordedReply:
    return ask(engine.port, path, json.dumps({"model": "tiny"} | fields).encode())


def stream(engine: Engine, **fields: Any) -> list[Chunk]:
    reply = post(engine, "/v1/chat/completions", **CHAT | fields)
    assert reply.status == 200, reply.raw
    if "fleet" not in fields:
        check(reply.frames)
    return chunks(reply.frames)


def chunks(frames: list[tuple[bytes, bytes]]) -> list[Chunk]:
    """Return the chunks of a stream. The last of each frame has the frame's record as the field `record`."""
    assert frames[-1][1].endswith(b"data: [DONE]\n\n")
    parsed: list[Chunk] = []
    for record, events in frames:
        lines = [line for line in events.split(b"\n\n")[:-1] if line != b"data: [DONE]"]
        parsed += [json.loads(line.removeprefix(b"data: ")) for line in lines]
        if record:
            parsed[-1]["record"] = engine_link.decode_records(record, 1)[0]
    return parsed


def text_of(chunks: list[Chunk]) -> str:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def logprobs_of(chunks: list[Chunk]) -> list[Any]:
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    return [logprob for logprobs in found if logprobs for logprob in logprobs["content"]]


def tokens_of(chunks: list[Chunk]) -> list[int]:
    records = [chunk["record"] for chunk in chunks if "record" in chunk]
    return [token for record in records for token in record.tokens.get(0, ())]


def resume_point(chunks: list[Chunk], tokens: list[int]) -> dict[str, Any]:
    first = chunks[0]
    start = next(chunk["record"].start for chunk in chunks if "record" in chunk)
    known = {name: getattr(start, name) for name in KNOWN}
    assert known | {"id": first["id"], "created": first["created"]} == known
    return {"tokens": tokens} | known


def ending(chunks: list[Chunk]) -> tuple[str, int]:
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert [reason for reason in reasons if reason] == reasons[-1:]
    return reasons[-1], chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.mlx
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("has_stop", [False, True])
def test_a_chat_cut_at_every_token_continues_equally(
    engine: Engine, settings: dict[str, Any], *, has_stop: bool
) -> None:
    fields = settings
    if has_stop:
        # One stop word that occurs, and one whose beginning occurs repeatedly.
        plain = text_of(stream(engine, **settings))
        fields = settings | {"stop": [plain[12:16], plain[3:6] + "\0"]}
    whole = stream(engine, **fields)
    tokens = tokens_of(whole)
    assert not has_stop or ending(whole)[0] == "stop"

    def resumed(cut: int) -> list[Chunk]:
        return stream(engine, **fields, fleet=resume_point(whole, tokens[:cut]))

    with ThreadPoolExecutor(8) as pool:
        rests = list(pool.map(resumed, range(len(tokens) + 1)))
    begun, cut = "", 0
    for chunk in whole:  # a gateway may continue after any record
        begun += text_of([chunk])
        if "record" not in chunk:
            continue
        cut += len(tokens_of([chunk]))
        assert begun + text_of(rests[cut]) == text_of(whole)
    for cut, rest in enumerate(rests):
        assert text_of(whole).endswith(text_of(rest))
        assert tokens[:cut] + tokens_of(rest) == tokens
        assert ending(rest) == ending(whole)
        assert rest[-1]["usage"] == whole[-1]["usage"]
        assert {(chunk["id"], chunk["created"]) for chunk in rest} == {
            (whole[0]["id"], whole[0]["created"])
        }
        assert not any("role" in c["choices"][0]["delta"] for c in rest if c["choices"])


@pytest.mark.mlx
def test_logprobs_continue_equally(engine: Engine) -> None:
    plain = text_of(stream(engine, temperature=0))
    fields = {"temperature": 0, "logprobs": True, "stop": [plain[4:9] + "\0"]}
    whole = stream(engine, **fields)
    begun: list[Chunk] = []
    for chunk in whole[:-1]:
        begun.append(chunk)
        if "record" not in chunk:
            continue
        rest = stream(engine, **fields, fleet=resume_point(whole, tokens_of(begun)))
        found = logprobs_of(begun) + logprobs_of(rest)
        expected = logprobs_of(whole)
        assert [one["token"] for one in found] == [one["token"] for one in expected]
        assert [one["logprob"] for one in found] == pytest.approx(
            [one["logprob"] for one in expected], abs=1e-3
        )
        assert text_of(begun) + text_of(rest) == text_of(whole)


@pytest.mark.mlx
def test_resume_records_have_all_fields(engine: Engine) -> None:
    whole = stream(engine, temperature=0, max_tokens=3)
    usage = whole[-1]["usage"]
    records = [chunk["record"] for chunk in whole if "record" in chunk]
    assert records[0].start.prompt_tokens == usage["prompt_tokens"]
    assert records[-1].output_tokens == usage["completion_tokens"]
    # Without a link, and for answers that cannot be continued, there are none.
    raw = engine.post("/v1/chat/completions", headers=HEADERS, **CHAT).raw
    assert all(line[:6] in (b"", b"data: ") for line in raw.split(b"\n"))
    reply = post(engine, "/v1/completions", prompt=["a", "b"], stream=True, max_tokens=3)
    assert (reply.status, reply.frames) == (200, [])


def by_choice(chunks: list[Chunk], count: int) -> list[list[Chunk]]:
    """Return the chunks of each choice."""
    found = [[c for c in chunks if c["choices"]] for _ in range(count)]
    return [[c for c in one if c["choices"][0]["index"] == at] for at, one in enumerate(found)]


@pytest.mark.mlx
def test_several_choices_cut_at_every_chunk_continue_equally(engine: Engine) -> None:
    fields = {"n": 3, "temperature": 1.5, "seed": 11}
    reply = post(engine, "/v1/chat/completions", **CHAT | fields)
    whole, log, cuts = chunks(reply.frames), ResumeLog(1000), []
    begun: list[list[Chunk]] = []
    for at, (record, _) in enumerate(reply.frames):
        log.add(record)
        cuts.append(log.resume_point(3))
        events = b"".join(events for _, events in reply.frames[: at + 1])
        begun.append(chunks([(b"", events if b"[DONE]" in events else events + DONE)]))

    def resumed(at: int) -> list[Chunk]:
        point = cuts[at]
        assert point is not None
        body = point.resume_body(json.dumps({"model": "tiny"} | CHAT | fields).encode())
        answer = ask(engine.port, "/v1/chat/completions", body)
        assert answer.status == 200, answer.raw
        assert answer.frames[0][0]
        return chunks(answer.frames)

    with ThreadPoolExecutor(3) as pool:
        rests = list(pool.map(resumed, range(len(cuts) - 1)))
    for at, rest in enumerate(rests):
        for index, expected in enumerate(by_choice(whole, 3)):
            mine = by_choice(begun[at], 3)[index] + by_choice(rest, 3)[index]
            assert text_of(mine) == text_of(expected)
            reasons = [one["choices"][0]["finish_reason"] for one in mine]
            assert [reason for reason in reasons if reason] == reasons[-1:]
        assert rest[-1]["usage"]["completion_tokens"] == whole[-1]["usage"]["completion_tokens"]


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 9}, "n": {"enum": [1, 22, 333]}},
            "required": ["word", "n"],
            "additionalProperties": False,
        },
    },
}


def calls_of(chunks: list[Chunk]) -> list[Any]:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return [call for delta in deltas for call in delta.get("tool_calls", ())]


def joined(pieces: list[Any]) -> dict[int, Any]:
    """Return the calls by index, whole: how many pieces they came in depends on how many tokens a chunk had."""
    found: dict[int, Any] = {}
    for piece in pieces:
        call = found.setdefault(piece["index"], {**piece, "function": {"arguments": ""}})
        function = piece["function"]
        arguments = call["function"]["arguments"] + function["arguments"]
        call["function"] = {**call["function"], **function, "arguments": arguments}
    return found


@pytest.mark.mlx
def test_a_call_continues_within_its_grammar(engine: Engine) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    fields = options | {"parallel_tool_calls": False, "max_tokens": 200, "seed": 3}
    whole = stream(engine, **fields)
    tokens = tokens_of(whole)
    assert ending(whole)[0] == "tool_calls"
    assert calls_of(whole)

    def resumed(cut: int) -> list[Chunk]:
        return stream(engine, **fields, fleet=resume_point(whole, tokens[:cut]))

    with ThreadPoolExecutor(8) as pool:
        rests = list(pool.map(resumed, range(len(tokens) + 1)))
    begun, cut = [], 0
    for chunk in whole:
        begun += calls_of([chunk])
        if "record" not in chunk:
            continue
        cut += len(tokens_of([chunk]))
        assert joined(begun + calls_of(rests[cut])) == joined(calls_of(whole))
    assert {ending(rest) for rest in rests} == {ending(whole)}


@pytest.mark.mlx
def test_wrong_continuations_are_refused(engine: Engine) -> None:
    whole = stream(engine, temperature=0)
    fleet = resume_point(whole, tokens_of(whole)[:3])
    cases: list[tuple[dict[str, str], dict[str, Any], int, str]] = [
        ({}, {}, 400, "fleet"),
        ({"x-fleet-resumable": "0"}, {}, 400, "fleet"),
        ({"x-fleet-resumable": "yes"}, {}, 400, "x-fleet-resumable"),
        (HEADERS, {"n": 2}, 400, "n"),
        (HEADERS, {"stream": False, "stream_options": None, "logprobs": True}, 400, "fleet"),
        (HEADERS, {"fleet": fleet | {"seed": "1"}}, 400, "fleet.seed"),
        (HEADERS, {"fleet": fleet | {"more": 1}}, 400, "fleet.more"),
        (HEADERS, {"fleet": {}}, 400, "fleet.seed"),
        (HEADERS, {"fleet": fleet | {"tokens": [999999]}}, 400, "fleet.tokens"),
        (HEADERS, {"fleet": fleet | {"choices": [[1], [2]]}}, 400, "fleet.tokens"),
        (HEADERS, {"fleet": fleet | {"choices": [[1]], "tokens": None}}, 400, "fleet.choices"),
        (HEADERS, {"messages": [{"role": "user", "content": "other"}]}, 409, "fleet.prompt"),
    ]
    for headers, fields, status, param in cases:
        body = CHAT | {"fleet": fleet} | fields
        reply = engine.post("/v1/chat/completions", headers=headers, **body)
        assert (reply.status, reply.error["param"]) == (status, param)


@pytest.mark.mlx
def test_a_completion_continues_equally(engine: Engine) -> None:
    fields = {"prompt": "We hold", "stream": True, "temperature": 0, "logprobs": 1}
    reply = post(engine, "/v1/completions", **fields)
    check(reply.frames)
    whole = chunks(reply.frames)
    tokens = tokens_of(whole)
    assert len(tokens) == 16
    fleet = resume_point(whole, tokens[:7])
    rest = chunks(post(engine, "/v1/completions", **fields, fleet=fleet).frames)
    texts = ["".join(one["choices"][0]["text"] for one in part) for part in (whole, rest)]
    assert texts[0].endswith(texts[1])
    offsets = [
        [
            at
            for one in part
            if one["choices"][0]["logprobs"]
            for at in one["choices"][0]["logprobs"]["text_offset"]
        ]
        for part in (whole, rest)
    ]
    assert offsets[0][7:] == offsets[1]
