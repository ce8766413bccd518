"""LoRA adapters with random weights, and models loaded with them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.gauges import Gauges
from models import model_files
from tests.support.mlx_models import module

PROMPT = "We hold these truths"


def make_adapter(
    out: Path,
    base: Path,
    *,
    kind: str = "lora",
    rank: int = 4,
    dropout: float = 0.0,
    dtype: str = "float32",
    seed: int = 7,
    keys: Sequence[str] = ("self_attn.q_proj", "mlp.up_proj"),
) -> Path:
    """Write an adapter as `mlx_lm.lora` does after training: random, and strong enough to change every answer."""
    mx, tuner = module("mlx.core"), module("mlx_lm.tuner.utils")
    model, _ = module("mlx_lm").load(str(base))
    parameters = {"rank": rank, "scale": 20.0, "dropout": dropout, "keys": list(keys)}
    model.freeze()
    tuner.linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {
        name: (mx.random.normal(array.shape) * 0.2 + (array if name.endswith(".m") else 0)).astype(
            getattr(mx, dtype)
        )
        for name, array in module("mlx.utils").tree_flatten(model.trainable_parameters())
    }
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def write_peft(out: Path, adapter: Path, **changes: Any) -> Path:
    """Write an adapter of mlx-lm's format as PEFT saves it; `changes` are fields of the config."""
    mx = module("mlx.core")
    parameters = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]
    held = mx.load(str(adapter / "adapters.safetensors"))
    weights = {}
    for name, array in held.items():
        layer, _, letter = name.rpartition(".lora_")
        weights[f"base_model.model.{layer}.lora_{letter.upper()}.weight"] = mx.contiguous(array.T)
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "adapter_model.safetensors"), weights)
    rank = parameters["rank"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": parameters["scale"] * rank,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "up_proj"],
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (out / "adapter_config.json").write_text(json.dumps(config | changes))
    return out


def load_adapted(
    folder: Path, adapter: Path | Mapping[str, Path] | None = None, gauges: Gauges | None = None
) -> Any:
    loader = module("engine.model.loader")
    return loader.load(
        folder,
        model_files.inspect_model(folder),
        gauges or Gauges(),
        is_stopping=lambda: False,
        options=loader.LoadOptions(adapter=adapter),
    )


def logits(model: Any) -> Any:
    mx = module("mlx.core")
    return model(mx.array([[5, 6, 7, 8]]))


def is_same(one: Any, other: Any) -> bool:
    return bool(module("mlx.core").array_equal(one, other))
