"""A model that sees images in the batch: it answers as mlx-vlm does, alone and beside others, and over HTTP."""

import base64
import dataclasses
import io
import json
import shutil
import subprocess
import sys
import warnings
import wave
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.jobs import Job
from engine.vision import media_reader
from models import model_files
from schemas.vision import Vision
from schemas.wire.errors import RefusedError
from tests.support import engine_batches
from tests.support.engine_process import START_S, Engine, eventually, launching
from tests.support.golden_cases import Golden
from tests.support.mlx_models import module
from tests.support.model_geometries import VISION_FAMILIES

# mlx-vlm brings 60 packages that nothing else needs: `make .venv-vision/.ready` makes an environment with them.
image_module = pytest.importorskip("PIL.Image", reason="Pillow is not here: run `make test-vision`")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not here: run `make test-vision`")
pytestmark = [pytest.mark.mlx, pytest.mark.full]

TABLE = "families.json"
VISION = Vision(max_images=3, max_image_bytes=300_000, max_pixels=120_000)
SERVED = ("qwen2_vl", "qwen3_5", "gemma3")
"""Those that an engine process serves in these tests: one of each way to place images."""


def data_url(color: tuple[int, int, int], width: int = 200, height: int = 120) -> str:
    drawn = image_module.new("RGB", (width, height), color)
    drawn.paste((255 - color[0], color[1], color[2] // 2), (0, 0, width // 3, height // 2))
    held = io.BytesIO()
    drawn.save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


RED, BLUE, WIDE = data_url((255, 0, 0)), data_url((0, 0, 255)), data_url((20, 250, 90), 420, 300)
# Of one test alone: a prompt that another test has sent is cached.
GREEN = data_url((0, 255, 0))


def make_folder(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Path:
    made: Path = tmp_path_factory.mktemp("models") / arch
    command = [sys.executable, "-m", "tests.support.tiny_vision", str(made)]
    subprocess.run([*command, "--arch", arch], check=True)
    return made


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load(folder)


def load(folder: Path) -> Any:
    facts = model_files.inspect_model(folder)
    gauges = module("engine.gauges").Gauges()
    loader = module("engine.model.loader")
    options = loader.LoadOptions(vision=VISION)
    return loader.load(folder, facts, gauges, is_stopping=lambda: False, options=options)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """Return the same folder as mlx-vlm loads it."""
    return module("mlx_vlm.utils").load_model(folder)


def kind_of(url: str) -> str:
    if url.startswith("data:audio"):
        return "audio"
    return "video" if url.startswith(("data:video", "data:image/gif")) else "image"


def make_turn(text: str, *urls: str) -> dict[str, Any]:
    parts = [{"type": kind_of(url), "url": url, "param": "messages"} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def make_job(
    loaded: Any, number: int, text: str, *urls: str, before: tuple[dict[str, Any], ...] = ()
) -> Job:
    turns: list[Any] = [*before, make_turn(text, *urls)]
    rules = loaded.image_rules
    media = media_reader.read_media(media_reader.media_parts(turns), rules)
    write = partial(media_reader.write_media, media=media, rules=rules)
    tokens = loaded.codec.encode_chat(media_reader.without_urls(turns), rewrite=write)
    images = tuple(image_input for medium in media for image_input in medium.inputs)
    media_reader.check_places(tokens, images, rules)
    named = media_reader.name_media(tokens, images, rules) if images else ()
    return engine_batches.job(number, tokens, images=images, cache_prompt=named, max_tokens=12)


def own_video(job: Job) -> dict[str, Any]:
    """Return what mlx-vlm's own processor makes of a job's frames."""
    mx = module("mlx.core")
    processing = module("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    first = job.images[0]
    data = b"".join(image_input.pixels for image_input in job.images)
    frames = np.frombuffer(data, dtype=np.uint8).reshape(-1, first.height, first.width, 3)
    found = processing.Qwen3VLVideoProcessor(min_pixels=1, max_pixels=1 << 30)([frames])
    return {"pixel_values": None} | {name: mx.array(value) for name, value in found.items()}


def own_recording(job: Job) -> dict[str, Any]:
    """Return what mlx-vlm's own processor makes of a job's recording."""
    mx = module("mlx.core")
    processing = module("mlx_vlm.models.gemma4.audio_feature_extractor")
    samples = np.frombuffer(job.images[0].pixels, dtype="<i2").astype(np.float32) / 32_768
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = processing.Gemma4AudioFeatureExtractor()([samples])
    return {"pixel_values": None} | {
        name: mx.array(value[0])[None] for name, value in found.items()
    }


def own_inputs(arch: str, config: Any, job: Job) -> dict[str, Any]:
    """Return what mlx-vlm's own processors make of a job's images."""
    mx = module("mlx.core")
    if job.images[0].kind == "frames":
        return own_video(job)
    if job.images[0].kind == "audio":
        return own_recording(job)
    images = [
        image_module.frombytes("RGB", (image_input.width, image_input.height), image_input.pixels)
        for image_input in job.images
    ]
    if arch.startswith(("qwen", "glm")):
        processing = module("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
        clip = {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
        clip |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
        options: Any = {} if arch.startswith("qwen3") else clip
        size = config.vision_config.patch_size
        found = processing.Qwen3VLImageProcessor(patch_size=size, **options)(images)
        return {name: mx.array(found[name]) for name in ("pixel_values", "image_grid_thw")}
    if arch == "gemma4":
        processing = module("mlx_vlm.models.gemma4.processing_gemma4")
        found, _ = processing.Gemma4ImageProcessor(max_soft_tokens=40)(images)
        types = mx.array([job.prompt]) == config.image_token_id
        return {"pixel_values": found["pixel_values"], "mm_token_type_ids": types.astype(mx.int32)}
    if arch == "mistral3":
        processing = module("mlx_vlm.models.pixtral.image_processing_pixtral")
        found = processing.PixtralImageProcessor(
            size={"longest_edge": 560}, patch_size={"height": 28, "width": 28}
        )(images)
        return {
            "pixel_values": mx.array(found["pixel_values"]),
            "image_sizes": found["image_sizes"],
        }
    pixels = [np.asarray(image).transpose(2, 0, 1) / 255.0 for image in images]
    return {"pixel_values": mx.array((np.stack(pixels) - 0.5) / 0.5, dtype=mx.float32)}


def own_answer(reference: Any, job: Job) -> list[int]:
    """Return what mlx-vlm itself generates for the prompt, with its own preprocessing of the images."""
    mx = module("mlx.core")
    arch, tokens = reference.config.model_type, mx.array([job.prompt])
    given = own_inputs(arch, reference.config, job) if job.images else {"pixel_values": None}
    for name in ("_rope_deltas", "_position_ids"):
        if hasattr(reference.language_model, name):
            setattr(reference.language_model, name, None)
    if arch == "gemma3" and job.images:
        return answer_in_blocks(reference, job, given["pixel_values"])
    steps = module("mlx_vlm.generate").generate_step(
        tokens, reference, mask=mx.ones_like(tokens), max_tokens=12, temperature=0, **given
    )
    return [int(token) for token, _ in steps]


def answer_in_blocks(reference: Any, job: Job, pixels: Any) -> list[int]:
    """Return the answer of Gemma 3 with the mask of its authors: mlx-vlm's generation leaves it out."""
    mx = module("mlx.core")
    tokens, language = mx.array([job.prompt]), reference.language_model
    embeddings = reference.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens))
    is_image = np.array(job.prompt) == reference.config.image_token_index
    block = np.where(is_image, np.cumsum(~is_image), -1)
    seen = np.tril(np.ones((len(block), len(block)), dtype=bool))
    seen |= (block[:, None] == block) & is_image
    window = np.arange(len(block))[:, None] - np.arange(len(block)) < language.config.sliding_window
    caches = language.make_cache()
    masks = [mx.array(seen if at % 2 else seen & window) for at in range(len(caches))]
    model = language.model
    hidden = embeddings.inputs_embeds * model.config.hidden_size**0.5
    for layer, mask, cache in zip(model.layers, masks, caches, strict=True):
        hidden = layer(hidden, mask, cache)
    logits = language.lm_head(model.norm(hidden))
    answer: list[int] = []
    while len(answer) < job.max_tokens:
        answer.append(int(mx.argmax(logits[0, -1])))
        logits = language(mx.array([answer[-1:]]), cache=caches).logits
    return answer


def test_a_batch_answers_as_mlx_vlm_does(
    folder: Path, loaded: Any, reference: Any, golden: Golden
) -> None:
    """With images, several images and none, together, one after the other, and from the prefix cache."""
    jobs = [
        make_job(loaded, 1, "what is this", RED),
        make_job(loaded, 2, "what is this", BLUE),
        make_job(loaded, 3, "a longer text without any image " * 20),
        make_job(loaded, 4, "compare these", RED, WIDE, BLUE),
        make_job(loaded, 5, "hello"),
    ]
    expected = {job.id: own_answer(reference, job) for job in jobs}
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
    golden.check_row(
        TABLE, folder.name, dict.fromkeys(("greedy", "batch", "turn", "images"), "yes")
    )


def frames_url(*colors: tuple[int, int, int]) -> str:
    files = []
    for color in colors:
        held = io.BytesIO()
        image_module.new("RGB", (96, 64), color).save(held, "JPEG")
        files.append(base64.b64encode(held.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(files)


def recording_url(hertz: float, seconds: float) -> str:
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        sound = np.sin(2 * np.pi * hertz * np.arange(int(16_000 * seconds)) / 16_000) * 20_000
        file.writeframes(sound.astype("<i2").tobytes())
    return "data:audio/wav;base64," + base64.b64encode(held.getvalue()).decode()


def test_frames_and_recordings_are_read_as_mlx_vlm_reads_them(
    folder: Path, loaded: Any, reference: Any, golden: Golden
) -> None:
    """Three frames and two of them, two recordings; together, beside a text, and once more from the cache."""
    if folder.name.startswith("qwen3"):
        kind = "video"
        urls = [
            frames_url((255, 0, 0), (0, 255, 0), (9, 9, 255)),
            frames_url((0, 0, 0), (255, 255, 0)),
        ]
    elif folder.name == "gemma4":
        kind = "audio"
        urls = [recording_url(440, 0.5), recording_url(2_000, 1.13)]
    else:
        with pytest.raises(RefusedError, match=r"no videos|hears no recordings"):
            make_job(loaded, 1, "what", frames_url((1, 2, 3)))
        with pytest.raises(RefusedError, match="hears no recordings"):
            make_job(loaded, 1, "what", recording_url(440, 0.1))
        return
    jobs = [make_job(loaded, at, "what is this", url) for at, url in enumerate(urls)]
    jobs.append(make_job(loaded, 5, "hello"))
    expected = {job.id: own_answer(reference, job) for job in jobs}
    assert expected[0] != expected[1]
    batch = engine_batches.new_batch(loaded, folder, vision=VISION)
    assert engine_batches.run(batch, *jobs) == expected
    again = [dataclasses.replace(job, id=job.id + 10) for job in jobs]
    assert engine_batches.run(batch, *again) == {job.id: expected[job.id - 10] for job in again}
    golden.check_row(TABLE, folder.name, {kind: "yes"})


def test_a_later_turn_reads_its_own_image_only(folder: Path, loaded: Any, reference: Any) -> None:
    before = (make_turn("what is this", RED), {"role": "assistant", "content": "a red box " * 9})
    jobs = [
        make_job(loaded, 1, "what is this", RED),
        make_job(loaded, 2, "and this", BLUE, before=before),
        make_job(loaded, 3, "and this", WIDE, before=before),
    ]
    batch = engine_batches.new_batch(loaded, folder, vision=VISION)
    outputs: list[Any] = []
    for job in jobs:
        batch.add(job)
        (outputs,) = engine_batches.drain(batch).values()
        assert engine_batches.tokens(outputs) == own_answer(reference, job)
    if not folder.name.startswith(
        "qwen3_5"
    ):  # states are kept where a prompt ended, not where it goes on
        assert outputs[0].cached_tokens > len(jobs[0].prompt)


def test_the_same_folder_serves_text_alone(folder: Path, reference: Any) -> None:
    loaded = engine_batches.load(folder)
    job = engine_batches.job(1, loaded.codec.encode_text("a text without any image"), max_tokens=12)
    answer = engine_batches.run(engine_batches.new_batch(loaded, folder), job)
    assert answer == {1: own_answer(reference, job)}


_PUBLISHED = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("embed_", "model.embed_"),
)


def published(arch: str, name: str, array: Any) -> tuple[str, Any]:
    """Return a tensor by the name and in the layout in which the model's authors publish it."""
    tower = "model.vision_tower." if arch == "gemma4" else "model.visual."
    for ours, theirs in (*_PUBLISHED, ("vision_tower.", tower), ("audio_", "model.audio_")):
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    if array.ndim == 5:
        array = array.transpose(0, 4, 1, 2, 3)
    if arch.startswith("glm") and name.endswith("downsample.weight"):
        array = array.transpose(0, 3, 1, 2)
    if arch == "qwen3_5" and "conv1d" in name:
        array = array.moveaxis(1, 2)
    norms = ("layernorm.weight", "language_model.norm.weight", "q_norm.weight", "k_norm.weight")
    if arch == "qwen3_5" and name.startswith("model.language_model") and name.endswith(norms):
        array = array - 1.0
    return name, array


@pytest.mark.parametrize("arch", ["qwen3_vl", "qwen3_5", "gemma4", "glm4v"])
def test_weights_are_found_by_their_published_names(
    arch: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    mx = module("mlx.core")
    folder, copy = make_folder(tmp_path_factory, arch), tmp_path / arch
    loaded = load(folder)
    shutil.copytree(folder, copy)
    weights = mx.load(str(folder / "model.safetensors"))
    renamed = dict(published(folder.name, name, array) for name, array in weights.items())
    assert not renamed.keys() & weights.keys()
    mx.save_safetensors(str(copy / "model.safetensors"), renamed)
    job = make_job(loaded, 1, "what is this", RED)
    batches = [engine_batches.new_batch(one, folder, vision=VISION) for one in (loaded, load(copy))]
    answers = [engine_batches.run(batch, job) for batch in batches]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("arch", ["qwen3_vl_moe", "gemma4", "mistral3"])
def test_quantized_weights_answer_as_mlx_vlm_does(
    arch: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mx, nn, utils = module("mlx.core"), module("mlx.nn"), module("mlx.utils")
    folder = make_folder(tmp_path_factory, arch)
    plain = load(folder)
    nn.quantize(
        plain.model,
        group_size=32,
        bits=8,
        class_predicate=lambda _, part: hasattr(part, "to_quantized")
        and part.weight.shape[-1] % 32 == 0,
    )
    weights = dict(utils.tree_flatten(plain.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load(folder)
    job = make_job(loaded, 1, "what is this", RED, WIDE)
    answer = engine_batches.run(engine_batches.new_batch(loaded, folder, vision=VISION), job)
    assert answer == {1: own_answer(module("mlx_vlm.utils").load_model(folder), job)}


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


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def engine(
    served: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with launching(tmp_path_factory.mktemp("vision"), blas_cache) as start:
        started = start(served, concurrency=4, vision=VISION)
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


def test_images_and_texts_over_http(engine: Engine, served: Path) -> None:
    red = ask(engine, image(RED), TEXT)
    assert red.status == 200, red.raw
    text = engine.chat("what is this")
    assert text.status == 200
    # 200 x 120 pixels are scaled to 196 x 112 or 192 x 128; Gemma 3 sees 16 tokens of each, between blank lines.
    expected = {"qwen2_vl": 7 * 4 + 2, "qwen3_5": 6 * 4 + 2, "gemma3": 16 + 2 + 4}[served.name]
    assert red.json["usage"]["prompt_tokens"] - text.json["usage"]["prompt_tokens"] == expected
    assert ask(engine, image(RED), TEXT).json["choices"] == red.json["choices"]
    again = ask(engine, image(RED), TEXT).json["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 20
    other = ask(engine, image(GREEN), TEXT, logprobs=True)
    assert other.json["usage"]["prompt_tokens_details"]["cached_tokens"] < 10  # the words before it


def test_frames_and_recordings_over_http(engine: Engine, served: Path) -> None:
    video = {"type": "video_url", "video_url": {"url": frames_url((255, 0, 0), (0, 0, 255))}}
    reply = ask(engine, video, TEXT)
    if served.name == "qwen3_5":
        assert reply.status == 200, reply.raw
        # One pair of 96 x 64 pixels, and its time and markers.
        grown = (
            reply.json["usage"]["prompt_tokens"]
            - engine.chat("what is this").json["usage"]["prompt_tokens"]
        )
        assert 3 * 2 + 2 < grown < 3 * 2 + 20
        assert ask(engine, video, TEXT).json["choices"] == reply.json["choices"]
    else:
        assert reply.status == 400
        assert "no videos" in reply.error["message"]
        assert reply.error["param"] == "messages[0].content[0].video_url.url"
    data = recording_url(440, 0.2).split(",")[1]
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    reply = ask(engine, TEXT, sound)
    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[1].input_audio.data")


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
    assert result.status == 200, result.raw
    blank = respond(engine, question, call, {**shown, "output": "x"})
    assert result.json["usage"]["input_tokens"] > blank.json["usage"]["input_tokens"] + 15


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
