"""The memory of speech models: what the proof counts for whisper and for voices."""

import json

import pytest

from models import footprint, inspection, model_files
from models.footprint import ServingLoad
from models.hf_config import ModelConfig
from models.model_files import ModelFacts, WeightTotals
from schemas.node import ModelGeometry

TINY = {"d_model": 384, "decoder_layers": 4, "encoder_attention_heads": 6, "vocab_size": 51_864}
LARGE = {"d_model": 1280, "decoder_layers": 32, "encoder_attention_heads": 20, "vocab_size": 51_866}
AS_CONVERTED = {"n_audio_state": 384, "n_text_layer": 4, "n_audio_head": 6, "n_vocab": 51_864}
WEIGHTS = WeightTotals(
    total_bytes=1000, half_bytes=1000, replicated_bytes=0, replicated_half_bytes=0, parameters=500
)


def facts(config: dict[str, object]) -> ModelFacts:
    parsed = ModelConfig.model_validate_json(json.dumps(config))
    return model_files.model_facts(parsed, WEIGHTS)


def geometry(config: dict[str, object], *, casts: bool = False) -> ModelGeometry:
    return model_files.model_geometry(facts(config), casts_to_float32=casts)


def test_whispers_memory_grows_with_its_size_and_not_with_requests() -> None:
    tiny, large = (
        geometry({"model_type": "whisper", **TINY}),
        geometry({"model_type": "whisper", **LARGE}),
    )
    assert tiny.work_bytes < large.work_bytes
    assert geometry({"model_type": "whisper", **AS_CONVERTED}).work_bytes == tiny.work_bytes
    for load in (ServingLoad(context_length=4096, concurrency=n) for n in (1, 64)):
        assert footprint.cache_bytes(large, load) == 0
        assert footprint.activation_bytes(large, load) == large.work_bytes
    assert not large.unknown
    assert geometry({"model_type": "whisper", **TINY}, casts=True).weights_bytes == 2000


@pytest.mark.parametrize(("family", "task"), [("whisper", "Transcribe"), ("pocket_tts", "Speak")])
def test_families_have_tasks(family: str, task: str) -> None:
    speech = facts({"model_type": family}).speech
    assert speech is not None
    assert speech.family.task == task
    assert facts({"model_type": "qwen3"}).speech is None


def test_a_node_without_mlx_audio_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    why = inspection.unsupported_reason(facts({"model_type": "whisper"}))
    assert "pip install 'mlx-fleet[audio]'" in why
