"""Measured cache footprints compared with the bytes that mlx-lm allocates and with the memory proof."""

from dataclasses import replace
from typing import Any

import pytest

from engine.cache.interface import KvOptions
from models import footprint
from models.footprint import CACHE_STEP, ROW_STEP, KvFootprint, ServingLoad
from tests.support import model_geometries as proof
from tests.support.mlx_models import BASE, GEMMA, MAMBA, Late, build

mx: Any = Late("mlx.core")
batch_caches: Any = Late("engine.cache.batch_caches")
layer_caches: Any = Late("engine.cache.layer_caches")

PLAIN = KvOptions()
CASES = [
    pytest.param({**BASE, "model_type": "qwen3"}, PLAIN, id="qwen3"),
    pytest.param({**BASE, "model_type": "llama"}, PLAIN, id="llama"),
    pytest.param({**BASE, "model_type": "qwen2"}, PLAIN, id="qwen2"),
    pytest.param({**BASE, "model_type": "llama"}, KvOptions(bits=4), id="quantised"),
    pytest.param({**BASE, "model_type": "llama"}, KvOptions(window=300), id="window"),
    pytest.param(GEMMA, PLAIN, id="rotating"),
    pytest.param(GEMMA, KvOptions(bits=8), id="rotating-and-quantised"),
    pytest.param(MAMBA, PLAIN, id="state"),
]
CHUNK = 200


def measure_padded(model: Any, options: KvOptions) -> KvFootprint:
    """Return the footprint of sequences that share arrays."""
    kv_footprint: KvFootprint = layer_caches.measure_footprint(model, options)
    return replace(kv_footprint, by_rows=False)


def held(
    model: Any, options: KvOptions, prompt: int, answer: int, *, reserved: int | None
) -> tuple[int, int]:
    """Return the bytes of a sequence's caches after its prompt, read in chunks, and after its answer."""
    caches = layer_caches.make_caches(model, options)
    batch_caches.set_reserved(caches, reserved)

    def read(count: int) -> int:
        model(mx.zeros((1, count), dtype=mx.int32), cache=caches)
        return sum(cache.nbytes for cache in caches)

    after_prompt = 0
    for start in range(0, prompt, CHUNK):
        after_prompt = read(min(CHUNK, prompt - start))
    found = [read(1) for _ in range(answer)]
    return after_prompt, found[-1]


@pytest.mark.mlx
@pytest.mark.parametrize(("config", "options"), CASES)
def test_the_footprint_covers_the_allocated_bytes(
    config: dict[str, Any], options: KvOptions
) -> None:
    model = build(config)
    measured = layer_caches.measure_footprint(model, options)
    for prompt, answer in ((1, 1), (100, 3), (255, 2), (256, 1), (530, 1)):
        tokens = prompt + answer
        for reserved in (0, tokens, tokens + 100) if measured.by_rows else (None,):
            reading, at_end = held(model, options, prompt, answer, reserved=reserved)
            predicted = measured.sequence_bytes(max(tokens, reserved or 0))
            assert at_end <= predicted
            assert reading <= predicted + measured.reading_bytes(CHUNK)
            step = measured.sequence_bytes(CACHE_STEP) - measured.constant_bytes
            assert predicted <= 1.3 * at_end + step


@pytest.mark.parametrize(
    ("tokens", "reserved", "slots"),
    [
        (1, None, 256),
        (257, None, 512),
        (1, 0, ROW_STEP),
        (65, 65, 128),
        (65, 200, 256),
        (65, 4_000, 256),
        (300, 400, 448),
        (300, 299, 320),
    ],
)
def test_a_cache_grows_as_far_as_its_memory_and_by_a_step_at_most(
    tokens: int, reserved: int | None, slots: int
) -> None:
    assert footprint.cache_slots(tokens, reserved) == slots


@pytest.mark.mlx
def test_each_row_of_a_batch_takes_the_bytes_of_the_longest() -> None:
    model = build(BASE)
    measured = measure_padded(model, PLAIN)
    rows = [layer_caches.make_caches(model, PLAIN) for _ in range(3)]
    for row, tokens in zip(rows, (5, 700, 40), strict=True):
        model(mx.zeros((1, tokens), dtype=mx.int32), cache=row)
    batch = [column[0].merge(list(column)) for column in zip(*rows, strict=True)]
    model(mx.zeros((3, 1), dtype=mx.int32), cache=batch)
    real = sum(one.nbytes for one in batch)
    assert real == measured.batch_bytes([701] * 3)


@pytest.mark.mlx
@pytest.mark.parametrize("options", [PLAIN, KvOptions(bits=8)], ids=str)
def test_rows_that_grow_join_and_leave_stay_within_the_footprint(options: KvOptions) -> None:
    model = build(BASE)
    measured = measure_padded(model, options)
    batch: list[Any] = []
    for tokens in (452, 200, 77):
        row = layer_caches.make_caches(model, options)
        model(mx.zeros((1, tokens), dtype=mx.int32), cache=row)
        merged = [one.merge([one]) for one in row]
        for mine, new in zip(batch, merged, strict=bool(batch)):
            mine.extend(new)
        batch = batch or merged
        model(mx.zeros((len(batch[0].offset.tolist()), 1), dtype=mx.int32), cache=batch)
    rows = 3
    for step in range(40):
        longest = max(batch[0].offset.tolist())
        assert sum(one.nbytes for one in batch) <= measured.batch_bytes([longest] * rows)
        model(mx.zeros((rows, 5), dtype=mx.int32), cache=batch)
        if step == 20:
            rows = 2
            for one in batch:
                one.filter(mx.array([0, 2]))


@pytest.mark.mlx
@pytest.mark.parametrize("family", proof.FAMILIES)
def test_the_engine_and_the_memory_proof_agree(family: str) -> None:
    config = {**proof.BASE, "model_type": family, **proof.FAMILIES[family]}
    if "text_config" in config:
        config = {"model_type": family, "vocab_size": 64, "text_config": config["text_config"]}
    measured = measure_padded(build(config), PLAIN)
    # What is held beside a window while a prompt is read is counted apart here.
    shape = proof.geometry(config).model_copy(update={"prefill_step": 0})
    for tokens in (1, 300, 1024):
        proved = footprint.cache_bytes(shape, ServingLoad(context_length=tokens, concurrency=3))
        assert measured.batch_bytes([tokens] * 3) == proved
        fewer = ServingLoad(context_length=tokens, concurrency=9, kv_tokens=4 * tokens)
        assert measured.load_bytes(fewer) == footprint.cache_bytes(shape, fewer)
