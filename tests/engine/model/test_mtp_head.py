"""Multi-token prediction heads of checkpoints: found, loaded, counted in the memory, or refused with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.gauges import Gauges
from models import footprint, model_files
from models.footprint import ServingLoad
from models.model_files import ModelUnusableError
from tests.support.engine_adapters import PROMPT
from tests.support.engine_batches import CONFIG, load
from tests.support.engine_process import Start, eventually
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def make(folder: Path, **changes: Any) -> Path:
    made: Path = module("tests.support.mtp_models").make(folder, **changes)
    return made


def add_head(folder: Path, gauges: Gauges | None = None) -> Any:
    gauges = gauges or Gauges()
    return module("engine.model.mtp_head").add_head(
        load(folder, gauges),
        model_files.inspect_model(folder),
        CONFIG.model_copy(update={"model_dir": folder, "mtp_tokens": 2}),
        gauges,
        is_stopping=lambda: False,
    )


@pytest.mark.parametrize(
    "arch", ["mimo", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5", "qwen3_5_moe"]
)
def test_a_head_is_found_without_mlx_and_loaded(tmp_path: Path, arch: str) -> None:
    is_qwen = arch.startswith("qwen")
    folder, gauges = make(tmp_path / arch, arch=arch, layers=3 if is_qwen else 2), Gauges()
    facts = model_files.inspect_model(folder)
    shape = model_files.model_geometry(facts, casts_to_float32=True)
    assert shape.has_mtp_head
    found = add_head(folder, gauges)
    assert found.mtp_head.projection.weight.shape == (64, 128)
    # The weights of a head that is used are not counted anew; its copies of the embeddings are never loaded.
    copies = 0 if arch == "mimo" or is_qwen else 2 * 8 * 64 * 4
    assert gauges.loaded_bytes == gauges.total_bytes == facts.weight_bytes - copies
    # The proof counts what its cache really takes.
    cache = module("mlx_lm.models.cache").KVCache()
    zeros = module("mlx.core").zeros((1, 256, 64))
    found.mtp_head(zeros, zeros, cache)
    load = ServingLoad(context_length=254, concurrency=4, draft_tokens=2, has_mtp=True)
    kept = footprint.MTP_KEPT_TOKENS * 64 * 4
    assert footprint.mtp_bytes(shape, load) == cache.nbytes + kept


def test_a_config_may_promise_a_head_that_is_not_there(tmp_path: Path) -> None:
    folder = make(tmp_path / "converted", has_head=False)
    facts = model_files.inspect_model(folder)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert model_files.model_geometry(facts, casts_to_float32=True).has_mtp_head is False
    with pytest.raises(
        ModelUnusableError,
        match=r"no multi-token prediction head \(no model\.mtp_l.*or use spec.model.ngram",
    ):
        add_head(folder)


def test_heads_of_other_models_are_refused(tiny: Path) -> None:
    with pytest.raises(
        ModelUnusableError, match="heads of qwen3 cannot be used, only those of deepseek_v3, "
    ):
        add_head(tiny)


def cut(path: Path) -> None:
    mx = module("mlx.core")
    tensors = mx.load(str(path))
    del tensors["model.mtp_layers.0.self_attn.q_proj.weight"]
    mx.save_safetensors(str(path), tensors)


def widen(path: Path) -> None:
    mx = module("mlx.core")
    tensors = mx.load(str(path))
    tensors["model.mtp_layers.0.input_proj.weight"] = mx.zeros((64, 64))
    mx.save_safetensors(str(path), tensors)


@pytest.mark.parametrize("damage", [cut, widen])
def test_a_broken_head_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = make(tmp_path / "mimo")
    damage(folder / "model-mtp.safetensors")
    with pytest.raises(ModelUnusableError, match="mimo: the multi-token prediction head: "):
        add_head(folder)


def test_a_quantized_head_is_used_as_it_is(tmp_path: Path) -> None:
    """The same numbers as those of the whole head, as far as 8 bits hold them; a quantized model may have a whole one."""
    mx = module("mlx.core")
    folder = make(tmp_path / "mimo")
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config))
    whole = add_head(folder).mtp_head
    assert "scales" not in whole.projection
    path = folder / "model-mtp.safetensors"
    tensors = mx.load(str(path))
    for name, array in list(tensors.items()):
        if array.ndim == 2:
            stem = name.removesuffix(".weight")
            packed = mx.quantize(array, group_size=32, bits=8)
            for part, one in zip(("weight", "scales", "biases"), packed, strict=True):
                tensors[f"{stem}.{part}"] = one
    mx.save_safetensors(str(path), tensors)
    packed = add_head(folder).mtp_head
    assert "scales" in packed.projection
    assert "scales" in packed.layer.mlp.up_proj
    state = mx.random.normal((1, 5, 64), key=mx.random.key(1))
    new_cache = module("mlx_lm.models.cache").KVCache
    near = mx.abs(packed(state, state, new_cache()) - whole(state, state, new_cache()))
    assert 0 < mx.max(near).item() < 0.2


@pytest.mark.ci
def test_an_engine_answers_the_same_with_its_head(tmp_path: Path, start: Start) -> None:
    folder = make(tmp_path / "mimo", influence=0.2)
    engine = start(folder, mtp_tokens=3, context_length=1024)
    eventually(engine.is_ready, within_s=60)
    model, tokenizer = module("mlx_lm").load(str(folder))
    wanted = module("mlx_lm").generate(model, tokenizer, PROMPT, max_tokens=300)
    for _ in range(2):
        reply = engine.post("/v1/completions", prompt=PROMPT, max_tokens=300, temperature=0)
        assert reply.json["choices"][0]["text"] == wanted
