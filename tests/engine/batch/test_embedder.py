"""The embedder: vectors of every pooling mode, in steps of any size."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.jobs import (
    EmbeddingOutput,
    EmbedJob,
    Job,
    JobFailure,
    SamplingParams,
    TokenOutput,
    WorkerEvent,
)
from engine.model import pooler
from tests.support.engine_batches import load, load_once, new_batch
from tests.support.engine_embedders import make_embedder, pooling
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

MODES = ["cls", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
TEXTS = [
    tuple((7 * row + 3 * at) % 480 + 10 for at in range(n))
    for row, n in enumerate((3, 70, 1, 21, 200, 8))
]


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tiny, tmp_path_factory.mktemp("vectors") / "model")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_once(folder)


def run(embedder: Any, tokens: int, most: int = 10_000) -> tuple[list[WorkerEvent], int]:
    """Step until idle; return the events and the number of steps."""
    events: list[WorkerEvent] = []
    for count in range(1, most):
        events += embedder.step(tokens)
        if embedder.is_idle:
            return events, count
    raise AssertionError("the embedder does not become idle")


def vectors(event: WorkerEvent) -> Any:
    assert isinstance(event, EmbeddingOutput), event
    return np.array([np.frombuffer(vector, "<f4") for vector in event.vectors])


def embedded(model: Any, pool: pooler.PoolerConfig, texts: Any = TEXTS, tokens: int = 10**6) -> Any:
    embedder = module("engine.batch.embedder").Embedder(model, pool)
    embedder.add(EmbedJob(id=1, prompts=tuple(texts)))
    (event,), _ = run(embedder, tokens)
    return vectors(event)


def pool_hidden(mode: str, hidden: Any) -> Any:
    """Pool the hidden states of one text, [tokens, width], as sentence-transformers defines it."""
    ranks = np.arange(1, len(hidden) + 1)[:, None]
    pooled = {
        "cls": hidden[0],
        "lasttoken": hidden[-1],
        "mean": hidden.mean(axis=0),
        "mean_sqrt_len_tokens": hidden.sum(axis=0) / np.sqrt(len(hidden)),
        "weightedmean": (hidden * ranks).sum(axis=0) / ranks.sum(),
    }
    return pooled[mode]


@pytest.mark.parametrize("mode", MODES)
def test_vectors_follow_the_pooling_mode_for_any_step_size(loaded: Any, mode: str) -> None:
    mx = module("mlx.core")
    plain = [np.array(loaded.model.model(mx.array([text])))[0] for text in TEXTS]
    expected = np.array([pool_hidden(mode, hidden) for hidden in plain])
    for tokens in (16, 64, 10**6):
        found = embedded(loaded.model, pooling(mode), tokens=tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    found = embedded(loaded.model, pooling(mode, normalize=True))
    np.testing.assert_allclose(found, pooler.normalize(expected), rtol=1e-4, atol=1e-5)


def test_a_step_is_bounded_and_jobs_come_and_go(loaded: Any) -> None:
    alone = embedded(loaded.model, pooling("mean"))
    embedder = module("engine.batch.embedder").Embedder(loaded.model, pooling("mean"))
    embedder.add(EmbedJob(id=1, prompts=(TEXTS[4],)))
    assert embedder.step(50) == []
    embedder.add(EmbedJob(id=2, prompts=tuple(TEXTS)))
    embedder.add(EmbedJob(id=3, prompts=(TEXTS[1],)))
    embedder.remove(1)  # in the middle of its text
    embedder.remove(99)
    events, steps = run(embedder, 50)
    assert {event.job_id for event in events} == {2, 3}
    assert steps >= (sum(len(text) for text in TEXTS) + len(TEXTS[1])) / 50
    (second,) = (event for event in events if event.job_id == 2)
    np.testing.assert_allclose(vectors(second), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("texts", [(tuple(range(10, 410)),), TEXTS * 8], ids=["long", "many"])
def test_a_short_request_waits_for_one_step_of_a_huge_one(loaded: Any, texts: Any) -> None:
    embedder = module("engine.batch.embedder").Embedder(loaded.model, pooling("mean"))
    embedder.add(EmbedJob(id=1, prompts=texts))
    assert embedder.step(32) == []
    embedder.add(EmbedJob(id=2, prompts=(TEXTS[0],)))
    embedder.add(EmbedJob(id=3, prompts=(TEXTS[5],)))
    early = [event for _ in range(3) for event in embedder.step(32)]
    assert {event.job_id for event in early} == {2, 3}
    (late,), _ = run(embedder, 32)
    expected = embedded(loaded.model, pooling("mean"), texts)
    np.testing.assert_allclose(vectors(late), expected, rtol=1e-4, atol=1e-5)


def test_a_long_text_ends_among_short_ones(loaded: Any) -> None:
    embedder = module("engine.batch.embedder").Embedder(loaded.model, pooling("cls"))
    embedder.add(EmbedJob(id=1, prompts=(tuple(range(10, 210)),)))
    for job_id in range(2, 60):
        embedder.add(EmbedJob(id=job_id, prompts=(TEXTS[3],)))
        if any(event.job_id == 1 for event in embedder.step(32)):
            return
    raise AssertionError("the long text waits for ever")


def test_a_failed_step_fails_the_jobs_of_the_embedder_only(loaded: Any) -> None:
    embedder = module("engine.batch.embedder").Embedder(loaded.model, pooling("cls"))
    inner, embedder._inner = embedder._inner, None
    embedder.add(EmbedJob(id=1, prompts=(TEXTS[0],)))
    embedder.add(EmbedJob(id=2, prompts=(TEXTS[1],)))
    faults = [*embedder.step(16), *embedder.step(16)]
    assert [(type(fault), fault.job_id) for fault in faults] == [(JobFailure, 1), (JobFailure, 2)]
    embedder._inner = inner
    embedder.add(EmbedJob(id=3, prompts=(TEXTS[0],)))
    assert len(run(embedder, 8)[0]) == 1


@pytest.mark.ci
def test_generation_continues_beside_a_long_list(loaded: Any, folder: Path) -> None:
    batch = new_batch(loaded, folder)
    batch.add(Job(id=1, prompt=TEXTS[1], max_tokens=4000, sampling=SamplingParams(temperature=0)))
    for _ in range(5):
        list(batch.step())
    batch.add(EmbedJob(id=2, prompts=tuple(TEXTS * 40)))
    tokens, steps, done = 0, 0, False
    while not done:
        events = [event for step in batch.step() for event in step]
        tokens += sum(isinstance(event, TokenOutput) for event in events)
        done = any(isinstance(event, EmbeddingOutput) for event in events)
        steps += 1
    assert steps > 3
    assert tokens >= steps - 1  # a token of the stream in every step
    batch.remove(1)
    list(batch.step())
    assert batch.is_idle


def test_a_checkpoint_without_head_and_prefix_loads(
    loaded: Any, folder: Path, tmp_path: Path
) -> None:
    """As Qwen3-Embedding-8B: inner names, no head, and a config without tied embeddings."""
    mx = module("mlx.core")
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "model.safetensors.index.json").unlink()
    tensors = mx.load(str(folder / "model.safetensors"))
    inner = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if "lm_head" not in name
    }
    mx.save_safetensors(str(bare / "model.safetensors"), inner, metadata={"format": "mlx"})
    found = load(bare)
    assert (loaded.has_head, found.has_head) == (True, False)
    assert found.pooling == pooling("lasttoken", normalize=True)
    np.testing.assert_array_equal(
        embedded(found.model, pooling("mean")), embedded(loaded.model, pooling("mean"))
    )
