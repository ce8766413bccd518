"""Encoders: vectors and scores equal to transformers', padded or alone, within the memory that was proven."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batch.text_queue import QueuedText
from engine.gauges import Gauges
from engine.jobs import EmbeddingOutput, EmbedJob, JobFailure, WorkerEvent
from machinery.clock import SystemClock
from models import model_files
from models.model_files import ModelUnusableError
from tests.support.engine_batches import CONFIG
from tests.support.engine_embedders import write_json
from tests.support.engine_encoders import CONFIGS, PAIRS, POSITIONS, TEXTS, make_encoder
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

REFERENCES = json.loads(Path(__file__).with_name("references.json").read_text())
SCORED = [family for family in CONFIGS if f"{family}-score" in REFERENCES]


def load(folder: Path, **changes: Any) -> tuple[Any, Any]:
    config = CONFIG.model_copy(update={"model_dir": folder, **changes})
    facts = model_files.inspect_model(folder)
    return module("engine.encoder.loader").load(  # type: ignore[no-any-return]
        config, facts, Gauges(), clock=SystemClock(), is_stopping=lambda: False
    )


def queued(codec: Any, texts: Any, seconds: Any = None) -> list[QueuedText]:
    pairs = zip(texts, seconds or [None] * len(texts), strict=True)
    encoded = [codec.encode_pair(*pair, max_tokens=POSITIONS, truncate=None) for pair in pairs]
    return [QueuedText(1, at, tuple(one), start) for at, (one, start) in enumerate(encoded)]


@pytest.mark.parametrize("family", CONFIGS)
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    runner, served = load(make_encoder(tmp_path / "model", family))
    texts = queued(served.codec, TEXTS)
    assert len({len(text.tokens) for text in texts}) > 3
    padded = runner.encode(texts)
    np.testing.assert_allclose(padded, REFERENCES[family], atol=2e-5)
    alone = np.concatenate([runner.encode([text]) for text in texts])
    np.testing.assert_allclose(padded, alone, atol=2e-5)


@pytest.mark.parametrize("family", SCORED)
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    runner, served = load(make_encoder(tmp_path / "model", family, is_classifier=True))
    firsts, seconds = zip(*PAIRS, strict=True)
    texts = queued(served.codec, firsts, seconds)
    assert [text.second_start > 0 for text in texts] == [family == "bert"] * len(PAIRS)
    np.testing.assert_allclose(runner.encode(texts)[:, 0], REFERENCES[f"{family}-score"], atol=2e-5)


def finish(runner: Any) -> list[WorkerEvent]:
    events: list[WorkerEvent] = []
    while not runner.is_idle:
        events += [event for step in runner.step() for event in step]
    return events


def test_jobs_share_batches_and_a_failure_costs_one_batch(tmp_path: Path) -> None:
    runner, served = load(make_encoder(tmp_path / "model", "bert", mode="cls"))
    prompts = tuple(text.tokens for text in queued(served.codec, TEXTS))
    runner.add(EmbedJob(id=1, prompts=prompts * 40))
    runner.batch_tokens = 2 * POSITIONS
    list(runner.step())
    runner.add(EmbedJob(id=2, prompts=prompts[:1]))
    assert [event.job_id for _ in range(2) for step in runner.step() for event in step] == [2]
    (event,) = finish(runner)
    assert isinstance(event, EmbeddingOutput)
    rows = np.array([np.frombuffer(vector, "<f4") for vector in event.vectors])
    np.testing.assert_allclose(rows[5:10], rows[:5], atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    position, runner.encoder.weights["position/weight"] = (
        runner.encoder.weights["position/weight"],
        None,
    )
    runner.add(EmbedJob(id=3, prompts=prompts))
    assert [type(event) for event in finish(runner)] == [JobFailure]
    runner.encoder.weights["position/weight"] = position
    runner.add(EmbedJob(id=4, prompts=prompts))
    assert [type(event) for event in finish(runner)] == [EmbeddingOutput]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_batch_takes_no_more_memory_than_was_proven(family: str, tmp_path: Path) -> None:
    mx = module("mlx.core")
    folder = make_encoder(tmp_path / "model", family)
    shape = model_files.inspect_model(folder).encoder
    assert shape is not None
    assert shape.max_tokens == POSITIONS
    runner, _ = load(folder)
    # What each token takes must be seen beside the scores, which are a constant.
    for tokens, count in (
        (POSITIONS, shape.batch_tokens // POSITIONS),
        (4, shape.batch_tokens // 4),
    ):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        runner.encode([QueuedText(1, at, tuple(range(4, 4 + tokens)), 0) for at in range(count)])
        assert mx.get_peak_memory() - before <= shape.work_bytes


def test_scores_in_parts_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a fused kernel, scores of a long text are computed for some queries at a time."""
    for family in ("bert", "modernbert"):
        runner, served = load(make_encoder(tmp_path / family, family))
        texts = queued(served.codec, TEXTS)
        whole = runner.encode(texts)
        monkeypatch.setattr(module("engine.encoder.transformer"), "SCORE_BYTES", 4000)
        monkeypatch.setattr(module("engine.encoder.transformer"), "_LOCAL_QUERIES", 7)
        np.testing.assert_allclose(runner.encode(texts), whole, atol=2e-5)
        monkeypatch.undo()


def test_quantized_and_half_precision_weights_are_close(tmp_path: Path) -> None:
    mx = module("mlx.core")
    plain = make_encoder(tmp_path / "plain", "bert")
    expected = np.array(REFERENCES["bert"])
    for name, limit in (("half", 0.01), ("packed", 0.2)):
        folder = make_encoder(tmp_path / name, "bert")
        tensors = mx.load(str(plain / "model.safetensors"))
        changed: dict[str, Any] = {}
        for key, tensor in tensors.items():
            stem = key.removesuffix(".weight")
            if name == "half":
                changed[key] = tensor.astype(mx.float16)
            elif tensor.ndim == 2 and key.endswith(".weight") and tensor.shape[-1] % 32 == 0:
                parts = mx.quantize(tensor, group_size=32, bits=8)
                changed |= dict(zip((key, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
            else:
                changed[key] = tensor
        mx.save_safetensors(str(folder / "model.safetensors"), changed)
        config = json.loads((folder / "config.json").read_text())
        write_json(folder, "config.json", {**config, "quantization": {"group_size": 32, "bits": 8}})
        runner, served = load(folder)
        np.testing.assert_allclose(runner.encode(queued(served.codec, TEXTS)), expected, atol=limit)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": 4}, "the weights lack layers.3.qkv"),
        ({"num_hidden_layers": 2}, "the weights have layers.2"),
        ({"hidden_size": 64}, "make no encoder"),
        ({"hidden_act": "mish"}, "the activation mish is not supported"),
        ({"position_embedding_type": "relative_key"}, "relative_key is not supported"),
        ({"num_attention_heads": 5}, "32 numbers in 5 heads"),
        ({"architectures": ["BertForSequenceClassification"]}, "2 classes"),
    ],
)
def test_a_folder_that_cannot_be_computed_is_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = make_encoder(tmp_path / "model", "bert")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder, "config.json", config | changes)
    with pytest.raises(ModelUnusableError, match=why):
        load(folder)


def test_settings_of_other_models_and_too_little_memory_are_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "bert")
    with pytest.raises(ModelUnusableError, match=r"an encoder \(bert\) has no use for n-grams"):
        load(folder, ngram_tokens=4)
    with pytest.raises(ModelUnusableError, match=r"set spec.resources.memory higher"):
        load(folder, memory_limit_bytes=600 << 20)
    (folder / "modules.json").unlink()
    with pytest.raises(ModelUnusableError, match=r"modules.json and 1_Pooling/config.json"):
        load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelUnusableError, match=r"pytorch_model.bin.*model.safetensors"):
        load(folder)
