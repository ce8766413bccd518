"""LoRA adapters of both formats: applied as mlx-lm does, and refused when they do not fit."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.gauges import Gauges
from models import adapter_files
from models.model_files import ModelUnusableError
from tests.support.engine_adapters import (
    PROMPT,
    is_same,
    load_adapted,
    logits,
    make_adapter,
    write_peft,
)
from tests.support.mlx_models import module
from tests.support.models import MODEL

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(400)]  # real models, beside other tests


@pytest.mark.parametrize(("kind", "dropout"), [("lora", 0.0), ("lora", 0.5), ("dora", 0.0)])
def test_an_adapter_changes_the_model_as_in_mlx_lm(
    tiny: Path, tmp_path: Path, kind: str, dropout: float
) -> None:
    folder = make_adapter(tmp_path / "law", tiny, kind=kind, dropout=dropout)
    found, base = load_adapted(tiny, folder), load_adapted(tiny)
    wanted, tokenizer = module("mlx_lm").load(str(tiny), adapter_path=str(folder))
    assert is_same(logits(found.model), logits(wanted))
    assert not is_same(logits(found.model), logits(base.model))
    generate = module("mlx_lm").generate
    theirs = generate(wanted, tokenizer, PROMPT, max_tokens=12)
    assert generate(found.model, tokenizer, PROMPT, max_tokens=12) == theirs
    assert generate(base.model, tokenizer, PROMPT, max_tokens=12) != theirs


@pytest.mark.parametrize("is_pefts", [False, True])
def test_adapter_bytes_are_loaded_and_match_the_agents_report(
    tiny: Path, adapter: Path, tmp_path: Path, *, is_pefts: bool
) -> None:
    folder = write_peft(tmp_path / "law", adapter) if is_pefts else adapter
    plain, with_adapter = Gauges(), Gauges()
    load_adapted(tiny, gauges=plain)
    load_adapted(tiny, folder, gauges=with_adapter)
    size = adapter_files.inspect_adapter(folder).bytes_in_memory(casts_to_float32=False)
    assert with_adapter.loaded_bytes == with_adapter.total_bytes == plain.loaded_bytes + size


def test_an_adapter_of_another_model_is_refused_with_a_tensor_name(
    adapter: Path, other: Path
) -> None:
    with pytest.raises(ModelUnusableError) as refused:
        load_adapted(other, adapter)
    assert str(refused.value).startswith(f"adapter: {adapter} (rank 4) is not for this model: ")
    assert "8 of its tensors do not fit, first model.layers.0." in str(refused.value)
    assert refused.value.reason == "AdapterUnusable"


def rewrite(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        parameters = config["lora_parameters"] | changes
        (folder / "adapter_config.json").write_text(
            json.dumps(config | {"lora_parameters": parameters})
        )

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rewrite(rank=8), "is not for this model: 8 of its tensors do not fit, first .*shape"),
        (rewrite(keys=["self_attn.nobody"]), "8 of its tensors do not fit, first .*not an adapter parameter"),
        (rewrite(keys=["self_attn.rope"]), "is not for this model: Can't convert layer of type"),
        (lambda f: (f / "adapters.safetensors").unlink(), "has no adapters.safetensors"),
        (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (shutil.rmtree, "is not a directory"),
    ],
)  # fmt: skip
def test_a_broken_adapter_is_refused(
    tiny: Path, adapter: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "law")
    damage(folder)
    with pytest.raises(ModelUnusableError, match=message):
        load_adapted(tiny, folder)


def test_an_adapter_may_not_declare_more_than_it_has(tiny: Path, tmp_path: Path) -> None:
    """Check that a file of magnitudes cannot become matrices of rank 65,536, which no proof has counted."""
    folder = make_adapter(tmp_path / "law", tiny, kind="dora")
    path = folder / "adapters.safetensors"
    held = module("mlx.core").load(str(path))
    magnitudes = {name: array for name, array in held.items() if name.endswith(".m")}
    module("mlx.core").save_safetensors(str(path), magnitudes)
    rewrite(rank=65_536)(folder)
    gauges = Gauges()
    with pytest.raises(ModelUnusableError, match=r"declares .* matrices that its weights do not"):
        load_adapted(tiny, folder, gauges=gauges)
    assert not gauges.loaded_bytes


@pytest.mark.ci
@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 40.0}}])
def test_pefts_format_is_applied_as_peft_does(
    tiny: Path, adapter: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    """PEFT: y + alpha / r (or alpha / sqrt(r)) * B A x, with the alpha of the first pattern that names the layer."""
    mx = module("mlx.core")
    folder = write_peft(tmp_path / "law", adapter, **config)
    adapted = load_adapted(tiny, folder)
    base = dict(load_adapted(tiny).model.named_modules())
    weights = mx.load(str(folder / "adapter_model.safetensors"))
    alpha = {"q_proj": 40.0 if "alpha_pattern" in config else 80.0, "up_proj": 80.0}
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        x = mx.random.normal((1, 3, 64))
        a, b = (weights[f"base_model.model.{name}.lora_{one}.weight"] for one in "AB")
        scale = alpha[name.rpartition(".")[2]] / (math.sqrt(4) if "use_rslora" in config else 4)
        wanted = base[name](x) + scale * (b @ (a @ x.swapaxes(-1, -2))).swapaxes(-1, -2)
        made = dict(adapted.model.named_modules())[name](x)
        assert mx.allclose(made, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.ci
def test_both_formats_give_mlx_lms_logits_and_texts(smollm2: Path, tmp_path: Path) -> None:
    mx, generate = module("mlx.core"), module("mlx_lm").generate
    base = smollm2 / MODEL
    ours = make_adapter(tmp_path / "law", base)
    wanted, tokenizer = module("mlx_lm").load(str(base), adapter_path=str(ours))
    theirs = generate(wanted, tokenizer, PROMPT, max_tokens=8)
    for folder in (ours, write_peft(tmp_path / "peft", ours)):
        found = load_adapted(base, folder).model
        assert mx.allclose(logits(found), logits(wanted), rtol=1e-3, atol=1e-3)
        assert generate(found, tokenizer, PROMPT, max_tokens=8) == theirs
    assert generate(load_adapted(base).model, tokenizer, PROMPT, max_tokens=8) != theirs


def test_a_peft_adapter_of_another_model_is_refused_with_a_layer(
    other: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = write_peft(tmp_path / "law", adapter)
    with pytest.raises(ModelUnusableError) as refused:
        load_adapted(other, folder)
    assert (
        "is not for this model: 4 of its layers do not fit, first model.layers.0.mlp.up_proj"
        in str(refused.value)
    )
    assert "is not in the model" not in str(refused.value)
