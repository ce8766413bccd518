"""Forms of answers: a worker tries each once, and the serving process compiles it once."""

from pathlib import Path
from typing import Any

import pytest

from engine.grammar import llguidance_backend
from engine.input_workers.pool import InputWorkers
from engine.openai.input_processor import InputProcessor, KnownGrammars, lane_of, work_length
from engine.openai.input_tasks import Lane
from engine.openai.request_body import GenerationRequest
from engine.ports import ServedModel
from engine.text.codec import TextCodec
from schemas.wire.errors import RefusedError
from tests.support.engine_requests import chat
from tests.support.input_workers import running
from tests.support.text_codecs import byte_level, load

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def processor_of(codec: TextCodec, inputs: InputWorkers) -> InputProcessor:
    grammars = llguidance_backend.make_compiler(codec.serialized, codec.eos_ids)
    ready = ServedModel(codec=codec, vocab_size=codec.size, grammars=grammars)
    return InputProcessor(
        ready=ready, context_length=4096, concurrency=4, inputs=inputs, fingerprint="f"
    )


def form(name: str, *texts: str) -> GenerationRequest:
    """Return a request for an object with one field, after some messages."""
    schema = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    turns = [{"role": "user", "content": text} for text in texts]
    return chat(messages=turns, response_format=wanted)


async def test_a_form_is_tried_once_and_compiled_once(tmp_path: Path, blas_cache: Path) -> None:
    codec = load(tmp_path, byte_level(), chat_template=TEMPLATE)
    async with running(codec, blas_cache) as inputs:
        processor = processor_of(codec, inputs)
        (first,) = await processor.choices(form("a", "hi"), first_id=1, fresh_seed=1)
        (second,) = await processor.choices(form("a", "what", "now"), first_id=2, fresh_seed=1)
        assert first.job.grammar == second.job.grammar is not None
        assert first.compiled is second.compiled is not None
        await processor.choices(form("b", "hi"), first_id=3, fresh_seed=1)
        lane: Any = inputs._lanes[Lane.GRAMMAR].worker
        assert lane.connection.asked == 2
        processor.close()


@pytest.mark.ci
async def test_a_schema_that_cannot_be_enforced_is_refused_each_time(
    tmp_path: Path, blas_cache: Path
) -> None:
    codec = load(tmp_path, byte_level(), chat_template=TEMPLATE)
    wanted = {
        "type": "object",
        "properties": {"a": {"minimum": 5, "maximum": 3, "type": "integer"}},
    }
    fields = {"name": "x", "schema": wanted | {"required": ["a"]}}
    request = chat(response_format={"type": "json_schema", "json_schema": fields})
    async with running(codec, blas_cache) as inputs:
        processor = processor_of(codec, inputs)
        for _ in range(2):
            with pytest.raises(RefusedError, match=r"\$.properties.a") as caught:
                await processor.choices(request, first_id=1, fresh_seed=1)
            assert caught.value.refusal.status == 400
        processor.close()


def test_known_grammars_are_bounded_by_number_and_by_size() -> None:
    known = KnownGrammars()
    for at in range(300):
        known.add(b"%d" % at, None if at % 2 else "g")
    assert known.get(b"0") is None
    assert (known.get(b"298"), known.get(b"299")) == (("g",), (None,))
    known.add(b"large", "g" * (16 << 20))
    assert known.get(b"298") is None
    assert known.get(b"large") is not None


@pytest.mark.parametrize(
    ("fields", "lane"),
    [
        ({"messages": [{"role": "user", "content": "hi"}] * 20}, Lane.SHORT),
        ({"messages": [{"role": "user", "content": "x" * 8_000}]}, Lane.MEDIUM),
        ({"messages": [{"role": "user", "content": ""}] * 4096}, Lane.LONG),
        ({"messages": [{"role": "user", "content": "x" * 50_000}]}, Lane.LONG),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, Lane.HUGE),
    ],
    ids=["a chat", "a page", "thousands of empty messages", "some pages", "a book"],
)
def test_a_text_has_the_lane_of_its_cost(fields: dict[str, Any], lane: Lane) -> None:
    assert lane_of(work_length(chat(**fields))) is lane
