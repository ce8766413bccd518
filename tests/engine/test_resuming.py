"""An answer that another process began: what is read again, what is refused, and that the text is the same, to the byte."""

import codecs
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RefusedError
from engine.jobs import Job, SamplingParams, TokenOutput
from engine.openai import input_processor
from engine.openai.request_body import ResumePoint
from engine.text.output_parser import OutputParser
from engine.text.reasoning import ReasoningParser, ThinkingMarkers, ThinkingState
from engine.text.spans import StopMatcher
from tests.engine.conftest import Engine
from tests.gateway.marked import check

END = 0
HEADERS = {"x-fleet-resumable": "1"}
KNOWN = ("seed", "prompt", "id", "created", "cached_tokens")


@dataclass(slots=True)
class Bytes:
    """A detokenizer whose tokens are bytes, so that most characters take several."""

    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    _text: str = ""

    def add_token(self, token: int) -> None:
        self._text += self._decoder.decode(bytes([token]))

    def finalize(self) -> None:
        self._text += self._decoder.decode(b"", final=True)

    @property
    def last_segment(self) -> str:
        found, self._text = self._text, ""
        return found


def reading(*stops: str) -> OutputParser:
    return OutputParser(detokenizer=Bytes(), stops=StopMatcher(stops))


def run(one: OutputParser, tokens: list[int], limit: int) -> tuple[list[int], str]:
    """Read tokens as a worker makes them; return those that were taken, and the text."""
    shown = ""
    for token in tokens:
        if one.is_over:
            break
        last = len(one.tokens) + 1 == limit
        finish: Any = "stop" if token == END else "length" if last else None
        shown += one.take(TokenOutput(job_id=1, token=token, finish=finish)).content
    return one.tokens, shown


def job(tokens: list[int], limit: int) -> Job:
    sampling = SamplingParams(temperature=0)
    return Job(id=1, prompt=(1,), max_tokens=limit, sampling=sampling, emitted=tuple(tokens))


@given(
    text=st.text(alphabet="ab<é世🌍\0", min_size=1, max_size=12),
    stops=st.lists(st.sampled_from(["<a", "b<", "世", "éa", "ab"]), max_size=2),
    limit=st.integers(1, 40),
)
def test_a_text_cut_at_any_token_goes_on_the_same(text: str, stops: list[str], limit: int) -> None:
    tokens = [*text.encode(), END][:limit]
    whole = reading(*stops)
    taken, shown = run(whole, tokens, limit)
    for cut in range(len(taken) + 1):
        first, second = reading(*stops), reading(*stops)
        _, begun = run(first, tokens[:cut], limit)
        input_processor.replay_tokens(second, job(tokens[:cut], limit), ends=(END,))
        assert second.is_over == first.is_over
        _, rest = run(second, tokens[cut:], limit)
        assert begun + rest == shown
        assert second.finish == whole.finish
        assert second.tokens == taken


def test_reasoning_is_counted_in_both_processes() -> None:
    thinking = ThinkingMarkers(start="<t>", end="</t>")
    tokens = list(b"<t>ab</t>c")
    for cut in range(len(tokens)):
        thoughts = ReasoningParser(thinking, ThinkingState.FREE)
        one = OutputParser(detokenizer=Bytes(), stops=StopMatcher(()), thoughts=thoughts)
        input_processor.replay_tokens(one, job(tokens[:cut], 99), ends=(END,))
        run(one, tokens[cut:], 99)
        assert one.reasoning_tokens == len(">ab</t>")


def refusal(tokens: tuple[int, ...] = (), mark: str = "m") -> Any:
    resumed = ResumePoint(tokens=tokens, seed=1, prompt=mark, id="x", created=1, cached_tokens=0)
    with pytest.raises(RefusedError) as caught:
        input_processor.resume_job(job([], 3), resumed, "m", vocab_size=10)
    return caught.value.refusal


def test_what_does_not_belong_here_is_refused() -> None:
    other = refusal(mark="other")
    assert (other.status, other.code, other.param) == (409, "prompt_differs", "fleet.prompt")
    assert refusal((1, 2, 3, 4)).param == "fleet.tokens"
    assert refusal((10,)).param == "fleet.tokens"


def test_a_prompts_digest_tells_tokens_apart() -> None:
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
    # Hot: most tokens are parts of characters. The penalties know what was emitted.
    {"temperature": 2, "seed": 7, "frequency_penalty": 1.5, "presence_penalty": 1},
    {"temperature": 0.8, "seed": -1, "top_p": 0.9, "repetition_penalty": 1.3},
]


def stream(engine: Engine, **fields: Any) -> list[Chunk]:
    reply = engine.post("/v1/chat/completions", headers=HEADERS, **CHAT | fields)
    assert reply.status == 200, reply.raw
    if "fleet" not in fields:
        check(reply.raw)
    return events(reply.raw)


def events(raw: bytes) -> list[Chunk]:
    parts = raw.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [chunk(part) for part in parts[:-2]]


def chunk(event: str) -> Chunk:
    """Return a chunk, with its mark as the field `fleet` if it has one."""
    mark, _, data = event.rpartition("\n")
    parsed: Chunk = json.loads(data.removeprefix("data: "))
    assert "fleet" not in parsed
    if mark:
        parsed["fleet"] = json.loads(mark.removeprefix(": fleet "))
    return parsed


def said(chunks: list[Chunk]) -> str:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def scores(chunks: list[Chunk]) -> list[Any]:
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    return [one for logprobs in told if logprobs for one in logprobs["content"]]


def consumed(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks if "fleet" in chunk for token in chunk["fleet"]["tokens"]]


def going_on(chunks: list[Chunk], tokens: list[int]) -> dict[str, Any]:
    first = chunks[0]
    known = {name: first["fleet"][name] for name in KNOWN}
    assert known | {"id": first["id"], "created": first["created"]} == known
    return {"tokens": tokens} | known


def ends(chunks: list[Chunk]) -> tuple[str, int]:
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert [reason for reason in reasons if reason] == reasons[-1:]
    return reasons[-1], chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.mlx
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("has_stop", [False, True])
def test_cut_at_every_token(engine: Engine, settings: dict[str, Any], *, has_stop: bool) -> None:
    fields = settings
    if has_stop:
        # A text that comes, some characters long, and another that is begun again and again.
        plain = said(stream(engine, **settings))
        fields = settings | {"stop": [plain[12:16], plain[3:6] + "\0"]}
    whole = stream(engine, **fields)
    tokens = consumed(whole)
    assert whole[0]["fleet"] | {"tokens": []} == whole[0]["fleet"]  # the role comes before all text
    assert not has_stop or ends(whole)[0] == "stop"

    def goes_on(cut: int) -> list[Chunk]:
        return stream(engine, **fields, fleet=going_on(whole, tokens[:cut]))

    with ThreadPoolExecutor(8) as pool:
        rests = list(pool.map(goes_on, range(len(tokens) + 1)))
    begun, cut = "", 0
    for chunk in whole:  # what a gateway has at the end of each chunk
        begun += said([chunk])
        cut += len(chunk.get("fleet", {"tokens": []})["tokens"])
        assert begun + said(rests[cut]) == said(whole)
    for cut, rest in enumerate(rests):
        assert said(whole).endswith(said(rest))
        assert tokens[:cut] + consumed(rest) == tokens
        assert ends(rest) == ends(whole)
        assert rest[-1]["usage"] == whole[-1]["usage"]
        assert {(chunk["id"], chunk["created"]) for chunk in rest} == {
            (whole[0]["id"], whole[0]["created"])
        }
        assert not any("role" in c["choices"][0]["delta"] for c in rest if c["choices"])


@pytest.mark.mlx
def test_likelihoods_go_on_as_well(engine: Engine) -> None:
    plain = said(stream(engine, temperature=0))
    fields = {"temperature": 0, "logprobs": True, "stop": [plain[4:9] + "\0"]}
    whole = stream(engine, **fields)
    begun: list[Chunk] = []
    for chunk in whole[:-1]:
        begun.append(chunk)
        rest = stream(engine, **fields, fleet=going_on(whole, consumed(begun)))
        found = scores(begun) + scores(rest)
        wanted = scores(whole)
        assert [one["token"] for one in found] == [one["token"] for one in wanted]
        assert [one["logprob"] for one in found] == pytest.approx(
            [one["logprob"] for one in wanted], abs=1e-3
        )
        assert said(begun) + said(rest) == said(whole)


@pytest.mark.mlx
def test_marks_tell_what_a_gateway_needs(engine: Engine) -> None:
    whole = stream(engine, temperature=0, max_tokens=3)
    *choice, usage = whole
    first, last = choice[0]["fleet"], choice[-1]["fleet"]
    assert set(first) == {"tokens", "prompt_tokens", *KNOWN}
    assert first["prompt_tokens"] == usage["usage"]["prompt_tokens"]
    assert [set(chunk["fleet"]) for chunk in choice[1:-1]] == [{"tokens"}] * (len(choice) - 2)
    assert last["usage"] == usage["usage"]
    assert "fleet" not in usage
    # What cannot be resumed has none.
    for fields in ({"n": 2}, {"stream": False, "stream_options": None}):
        reply = engine.post("/v1/chat/completions", headers=HEADERS, **CHAT | fields)
        assert reply.status == 200
        assert b": fleet" not in reply.raw


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


def called(chunks: list[Chunk]) -> list[Any]:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return [call for delta in deltas for call in delta.get("tool_calls", ())]


@pytest.mark.mlx
def test_a_call_goes_on_within_its_grammar(engine: Engine) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    fields = options | {"parallel_tool_calls": False, "max_tokens": 200, "seed": 3}
    whole = stream(engine, **fields)
    tokens = consumed(whole)
    assert ends(whole)[0] == "tool_calls"
    assert called(whole)

    def goes_on(cut: int) -> list[Chunk]:
        return stream(engine, **fields, fleet=going_on(whole, tokens[:cut]))

    with ThreadPoolExecutor(8) as pool:
        rests = list(pool.map(goes_on, range(len(tokens) + 1)))
    begun, cut = [], 0
    for chunk in whole:
        begun += called([chunk])
        cut += len(chunk.get("fleet", {"tokens": []})["tokens"])
        assert begun + called(rests[cut]) == called(whole)
    assert {ends(rest) for rest in rests} == {ends(whole)}


@pytest.mark.mlx
def test_only_gateways_continue_and_only_one_stream(engine: Engine) -> None:
    whole = stream(engine, temperature=0)
    fleet = going_on(whole, consumed(whole)[:3])
    cases: list[tuple[dict[str, str], dict[str, Any], int, str]] = [
        ({}, {}, 400, "fleet"),
        ({"x-fleet-resumable": "0"}, {}, 400, "fleet"),
        ({"x-fleet-resumable": "yes"}, {}, 400, "x-fleet-resumable"),
        (HEADERS, {"n": 2}, 400, "n"),
        (HEADERS, {"stream": False, "stream_options": None}, 400, "fleet"),
        (HEADERS, {"fleet": fleet | {"seed": "1"}}, 400, "fleet.seed"),
        (HEADERS, {"fleet": fleet | {"more": 1}}, 400, "fleet.more"),
        (HEADERS, {"fleet": {}}, 400, "fleet.tokens"),
        (HEADERS, {"fleet": fleet | {"tokens": [999999]}}, 400, "fleet.tokens"),
        (HEADERS, {"messages": [{"role": "user", "content": "other"}]}, 409, "fleet.prompt"),
    ]
    for headers, fields, status, param in cases:
        body = CHAT | {"fleet": fleet} | fields
        reply = engine.post("/v1/chat/completions", headers=headers, **body)
        assert (reply.status, reply.error["param"]) == (status, param)


@pytest.mark.mlx
def test_a_completion_goes_on_too(engine: Engine) -> None:
    fields = {"prompt": "We hold", "stream": True, "temperature": 0, "logprobs": 1}
    reply = engine.post("/v1/completions", headers=HEADERS, **fields)
    check(reply.raw)
    whole = events(reply.raw)
    tokens = consumed(whole)
    assert len(tokens) == 16
    fleet = going_on(whole, tokens[:7])
    rest = events(engine.post("/v1/completions", headers=HEADERS, **fields, fleet=fleet).raw)
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
