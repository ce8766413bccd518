"""A model that sees images in the batch: it answers as mlx-vlm does, alone and beside others, and over HTTP."""

import base64
import dataclasses
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.jobs import Job
from engine.vision import image_reader
from models import model_files
from schemas.vision import Vision
from tests.support import engine_batches
from tests.support.engine_process import START_S, Engine, eventually, launching
from tests.support.mlx_models import module

# mlx-vlm brings 60 packages that nothing else needs: `make .venv-vision/.ready` makes an environment with them.
image_module = pytest.importorskip("PIL.Image", reason="Pillow is not here: run `make test-vision`")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not here: run `make test-vision`")
pytestmark = [pytest.mark.mlx, pytest.mark.full]

VISION = Vision(max_images=3, max_image_bytes=300_000, max_pixels=120_000)
ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl")


def data_url(color: tuple[int, int, int], width: int = 200, height: int = 120) -> str:
    drawn = image_module.new("RGB", (width, height), color)
    drawn.paste((255 - color[0], color[1], color[2] // 2), (0, 0, width // 3, height // 2))
    held = io.BytesIO()
    drawn.save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


RED, BLUE, WIDE = data_url((255, 0, 0)), data_url((0, 0, 255)), data_url((20, 250, 90), 420, 300)
# Of one test alone: a prompt that another test has sent is cached.
GREEN = data_url((0, 255, 0))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("models") / request.param
    command = [sys.executable, "-m", "tests.support.tiny_vision", str(made)]
    subprocess.run([*command, "--arch", request.param], check=True)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    facts = model_files.inspect_model(folder)
    gauges = module("engine.gauges").Gauges()
    loader = module("engine.model.loader")
    options = loader.LoadOptions(vision=VISION)
    return loader.load(folder, facts, gauges, is_stopping=lambda: False, options=options)


def make_job(loaded: Any, number: int, text: str, *urls: str) -> Job:
    parts = [{"type": "image", "url": url, "param": "messages"} for url in urls]
    turns: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    images = image_reader.read_images(image_reader.image_urls(turns), loaded.image_rules)
    tokens = loaded.codec.encode_chat(image_reader.without_urls(turns))
    tokens = image_reader.expand_tokens(tokens, images, loaded.image_rules.token, param="messages")
    salt = ":".join(image_input.digest for image_input in images)
    return engine_batches.job(number, tokens, images=images, cache_salt=salt, max_tokens=12)


def own_answer(loaded: Any, job: Job) -> list[int]:
    """Return what mlx-vlm's model itself answers to the prompt, with its own preprocessing of the images."""
    mx, cache = module("mlx.core"), module("mlx_lm.models.cache")
    inner = loaded.model._inner
    language = inner.language_model
    language._rope_deltas = language._position_ids = None
    given: dict[str, Any] = {}
    if job.images:
        processing = module("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
        processor = processing.Qwen3VLImageProcessor(
            patch_size=14,
            image_mean=[0.48145466, 0.4578275, 0.40821073],
            image_std=[0.26862954, 0.26130258, 0.27577711],
        )
        seen = [
            image_module.frombytes(
                "RGB", (image_input.width, image_input.height), image_input.pixels
            )
            for image_input in job.images
        ]
        found = processor(seen)
        given = {name: mx.array(found[name]) for name in ("pixel_values", "image_grid_thw")}
    caches = [cache.KVCache() for _ in language.layers]
    logits = inner(mx.array([job.prompt]), cache=caches, **given).logits
    answer: list[int] = []
    while len(answer) < job.max_tokens:
        answer.append(int(mx.argmax(logits[0, -1])))
        logits = language(mx.array([answer[-1:]]), cache=caches).logits
    language._rope_deltas = language._position_ids = None
    return answer


def test_a_batch_answers_as_mlx_vlm_does(folder: Path, loaded: Any) -> None:
    """With images, several images and none, together, one after the other, and from the prefix cache."""
    jobs = [
        make_job(loaded, 1, "what is this", RED),
        make_job(loaded, 2, "what is this", BLUE),
        make_job(loaded, 3, "a longer text without any image " * 20),
        make_job(loaded, 4, "compare these", RED, WIDE, BLUE),
        make_job(loaded, 5, "hello"),
    ]
    expected = {job.id: own_answer(loaded, job) for job in jobs}
    assert (
        engine_batches.run(engine_batches.new_batch(loaded, folder, vision=VISION), *jobs)
        == expected
    )
    batch = engine_batches.new_batch(loaded, folder, vision=VISION)
    for job in jobs:
        assert engine_batches.run(batch, job) == {job.id: expected[job.id]}
    again = [dataclasses.replace(job, id=job.id + 10) for job in jobs]
    found = engine_batches.run(batch, *again)
    assert found == {job.id: expected[job.id - 10] for job in again}
    assert loaded.model._seen == {}  # what was seen is freed with its request
    assert batch.executor.prefix.stats.hit_tokens > 0
    assert batch.executor.by_rows


def test_a_stopped_job_still_sees_its_image(folder: Path, loaded: Any) -> None:
    jobs = [make_job(loaded, 1, "what is this", RED), make_job(loaded, 2, "and this", BLUE)]
    batch = engine_batches.new_batch(loaded, folder, vision=VISION)
    expected = engine_batches.run(batch, *jobs)
    batch.executor.prefix.trim(0)
    for job in jobs:
        batch.add(job)
    events = [event for _ in range(5) for event in engine_batches.step(batch)]
    # As the loop does if the memory guard takes its memory; nothing is kept, so the image is read again.
    events += batch.executor.decode(reads_on=True, preempts=(1,))
    batch.memory.release(1)
    batch.executor.prefix.trim(0)
    batch._scheduler.add_first(batch.executor.jobs[1])
    found = engine_batches.drain(batch, events)
    assert {at: engine_batches.tokens(made) for at, made in found.items()} == expected


def test_the_image_decides_about_the_answer(folder: Path, loaded: Any) -> None:
    urls = [data_url((at * 50, 255 - at * 60, at * 40), 56 * (at + 1), 112) for at in range(4)]
    jobs = [make_job(loaded, at, "what is this", url) for at, url in enumerate(urls)]
    batch = engine_batches.new_batch(loaded, folder, vision=VISION)
    answers = engine_batches.run(batch, *jobs)
    assert len({tuple(answer) for answer in answers.values()}) > 1
    scored = [
        dataclasses.replace(make_job(loaded, 10 + at, "what is this", url), top_logprobs=0)
        for at, url in enumerate((RED, BLUE))
    ]
    outputs = engine_batches.drain(_with(batch, scored))
    first = [outputs[job.id][0].logprobs.logprob for job in scored]  # type: ignore[union-attr]
    assert scored[0].prompt == scored[1].prompt
    assert first[0] != first[1]


def _with(batch: Any, jobs: list[Job]) -> Any:
    for job in jobs:
        batch.add(job)
    return batch


@pytest.fixture(scope="module")
def engine(
    folder: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with launching(tmp_path_factory.mktemp("vision"), blas_cache) as start:
        started = start(folder, concurrency=4, vision=VISION)
        eventually(started.is_ready, within_s=START_S)
        yield started


def ask(engine: Engine, *parts: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": list(parts)}]
    return engine.post(
        "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0, **fields
    )


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT = {"type": "text", "text": "what is this"}


def test_images_and_texts_over_http(engine: Engine) -> None:
    red = ask(engine, image(RED), TEXT)
    assert red.status == 200, red.raw
    text = engine.chat("what is this")
    assert text.status == 200
    # 200 x 120 pixels are scaled to 196 x 112: 7 x 4 tokens, and the two markers around them.
    assert red.json["usage"]["prompt_tokens"] - text.json["usage"]["prompt_tokens"] == 7 * 4 + 2
    assert ask(engine, image(RED), TEXT).json["choices"] == red.json["choices"]
    again = ask(engine, image(RED), TEXT).json["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 20
    other = ask(engine, image(GREEN), TEXT, logprobs=True)
    assert other.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def respond(engine: Engine, *items: Any) -> Any:
    fields: dict[str, Any] = {"input": list(items), "max_output_tokens": 8, "temperature": 0}
    return engine.post("/v1/responses", **fields)


def input_image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


INPUT_TEXT = {"type": "input_text", "text": "what is this"}


def test_responses_see_the_images_that_chats_see(engine: Engine) -> None:
    chat = ask(engine, image(BLUE), TEXT).json
    item = {"role": "user", "content": [input_image(BLUE, detail="auto"), INPUT_TEXT]}
    reply = respond(engine, item)
    assert reply.status == 200, reply.raw
    usage = reply.json["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] > 20
    texts = [part["text"] for one in reply.json["output"] for part in one.get("content", ())]
    message = chat["choices"][0]["message"]
    assert "".join(texts) == (message.get("reasoning_content") or "") + (message["content"] or "")
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    shown = {"type": "function_call_output", "call_id": "c1", "output": [input_image(RED)]}
    question = {"role": "user", "content": "look"}
    result = respond(engine, question, call, shown)
    assert "its chat template knows none in this role" in result.error["message"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", "A URL of a network is not fetched"),
        ("file:///etc/passwd", "This is not fetched"),
        ("data:image/png;base64,AAAA", "This is no image in PNG, JPEG, WebP or GIF format"),
        ("data:image/png;base64,A?==", "is no base64"),
        ("data:image/png,AAAA", "must be base64"),
        (RED[:-60], "The image is broken"),
        ("data:image/png;base64," + "A" * 500_000, "at most 300000 (spec.model.vision.maxImage"),
        (data_url((1, 1, 1), 20_000, 4_000), "20000 x 4000 pixels; at most 24000000"),
        (data_url((1, 1, 1), 6_000, 10), "200 times"),
    ],
    ids=["http", "file", "no image", "no base64", "plain", "cut", "bytes", "pixels", "ratio"],
)
def test_an_image_beyond_the_limits_is_refused(engine: Engine, url: str, words: str) -> None:
    reply = ask(engine, TEXT, image(url))
    assert reply.status == 400, reply.raw
    assert words in reply.error["message"]
    assert reply.error["param"] == "messages[0].content[1].image_url.url"
    assert ask(engine, image(RED), TEXT).status == 200


def test_an_image_that_is_small_in_bytes_only(engine: Engine) -> None:
    """It has 23 million pixels in some kilobytes, and is decoded within the limits of a worker."""
    reply = ask(engine, image(data_url((1, 1, 1), 6_000, 3_900)), TEXT)
    assert reply.status == 200, reply.raw
    assert reply.json["usage"]["prompt_tokens"] < 120_000 // 784 + 40
    replies = [ask(engine, image(RED), TEXT).status for _ in range(2)]
    assert replies == [200, 200]
