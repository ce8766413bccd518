"""LoRA adapters and draft models on the tiny model: as mlx-lm applies them, or refused in a sentence."""

import contextlib
import importlib
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.flags import parse
from engine.gauges import Gauges
from models import adapter_files, model_files
from models.model_files import ModelUnusableError
from tests.engine.conftest import Start, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
PROMPT = "We hold these truths"


def module(name: str) -> Any:
    """Import late: mlx_lm takes seconds, and lowers a limit of the process that it is imported into."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = importlib.import_module(name)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return found


def make_adapter(
    out: Path,
    base: Path,
    *,
    kind: str = "lora",
    rank: int = 4,
    dropout: float = 0.0,
    dtype: str = "float32",
) -> Path:
    """Write an adapter as `mlx_lm.lora` does after a training: random, and strong enough to change every answer."""
    mx, tuner = module("mlx.core"), module("mlx_lm.tuner.utils")
    model, _ = module("mlx_lm").load(str(base))
    parameters = {
        "rank": rank,
        "scale": 20.0,
        "dropout": dropout,
        "keys": ["self_attn.q_proj", "mlp.up_proj"],
    }
    model.freeze()
    tuner.linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    mx.random.seed(7)
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


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "law", tiny)


def load(folder: Path, adapter: Path | None = None, gauges: Gauges | None = None) -> Any:
    loading = module("engine.model.loader")
    return loading.load(
        folder,
        model_files.inspect_model(folder),
        gauges or Gauges(),
        is_stopping=lambda: False,
        adapter=adapter,
    )


def logits(model: Any) -> Any:
    mx = module("mlx.core")
    return model(mx.array([[5, 6, 7, 8]]))


def is_same(one: Any, other: Any) -> bool:
    return bool(module("mlx.core").array_equal(one, other))


@pytest.mark.parametrize(("kind", "dropout"), [("lora", 0.0), ("lora", 0.5), ("dora", 0.0)])
def test_an_adapter_changes_the_model_as_mlx_lm_says(
    tiny: Path, tmp_path: Path, kind: str, dropout: float
) -> None:
    folder = make_adapter(tmp_path / "law", tiny, kind=kind, dropout=dropout)
    found, base = load(tiny, folder), load(tiny)
    wanted, tokenizer = module("mlx_lm").load(str(tiny), adapter_path=str(folder))
    assert is_same(logits(found.model), logits(wanted))
    assert not is_same(logits(found.model), logits(base.model))
    generate = module("mlx_lm").generate
    theirs = generate(wanted, tokenizer, PROMPT, max_tokens=12)
    assert generate(found.model, tokenizer, PROMPT, max_tokens=12) == theirs
    assert generate(base.model, tokenizer, PROMPT, max_tokens=12) != theirs


def test_its_bytes_are_loaded_and_are_those_that_the_agent_reports(
    tiny: Path, adapter: Path
) -> None:
    plain, with_adapter = Gauges(), Gauges()
    load(tiny, gauges=plain)
    load(tiny, adapter, gauges=with_adapter)
    size = adapter_files.inspect_adapter(adapter).bytes_in_memory(casts_to_float32=False)
    assert with_adapter.loaded_bytes == with_adapter.total_bytes == plain.loaded_bytes + size


def test_half_precision_is_widened_on_linux(tiny: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "law", tiny, dtype="bfloat16")
    model = load(tiny, folder).model
    arrays = module("mlx.utils").tree_flatten(model.parameters())
    kinds = {str(array.dtype) for name, array in arrays if ".lora_" in name}
    assert kinds == (
        {"mlx.core.float32"} if module("sys").platform == "linux" else {"mlx.core.bfloat16"}
    )


@pytest.fixture(scope="module")
def other(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrower model with the same tokens, half the layers and half the context."""
    make = module("tests.support.tiny_model").make
    return Path(
        make(tmp_path_factory.mktemp("models") / "small", hidden=32, layers=1, context=2048)
    )


def test_an_adapter_of_another_model_is_refused_with_a_tensor_of_it(
    adapter: Path, other: Path
) -> None:
    with pytest.raises(ModelUnusableError) as refused:
        load(other, adapter)
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
        load(tiny, folder)


def config_of(folder: Path, draft: Path, *, context: int = 1024) -> EngineConfig:
    return parse(
        [
            *(
                "--model-dir",
                str(folder),
                "--replica",
                "tiny-0",
                "--replica-uid",
                "u",
                "--node",
                "a",
            ),
            *("--served-name", "tiny", "--port", "4100", "--context-length", str(context)),
            *("--concurrency", "2", "--draft-model", str(draft)),
        ]
    )


def drafted(folder: Path, draft: Path, *, context: int = 1024, gauges: Gauges | None = None) -> Any:
    gauges = gauges or Gauges()
    return module("engine.model.draft_model").with_draft(
        load(folder, gauges=gauges),
        config_of(folder, draft, context=context),
        gauges,
        is_stopping=lambda: False,
    )


def test_a_draft_model_comes_with_the_model(tiny: Path, other: Path) -> None:
    gauges = Gauges()
    found = drafted(tiny, other, gauges=gauges)
    assert len(found.draft.layers) == 1
    assert logits(found.draft).shape == logits(found.model).shape
    weights = sum(model_files.inspect_model(folder).weight_bytes for folder in (tiny, other))
    assert gauges.loaded_bytes == gauges.total_bytes == weights
    assert load(tiny).draft is None


def sliding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        ({"vocab": 400}, None, "cannot be the draft model: it knows 400 tokens, the model 512, and .* small model of the same"),
        ({"has_markers": False}, None, "cannot be the draft model: .*of the model's are not the same there, first "),
        ({"context": 512}, None, "context length 1024 is more than"),
        ({"arch": "llama"}, sliding, r"layers that cannot take back a wrong guess \(RotatingKVCache\)"),
        ({}, lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        ({}, lambda f: (f / "model.safetensors").write_bytes(b"x"), "is not a safetensors file"),
        ({}, shutil.rmtree, "is not a directory"),
    ],
)  # fmt: skip
def test_what_cannot_guess_is_refused(
    tiny: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    damage: Callable[[Path], object] | None,
    message: str,
) -> None:
    folder = module("tests.support.tiny_model").make(tmp_path / "small", **changes)
    if damage is not None:
        damage(folder)
    with pytest.raises(ModelUnusableError, match=message):
        drafted(tiny, folder)


def test_an_engine_serves_with_both(tiny: Path, adapter: Path, other: Path, start: Start) -> None:
    """The whole way: flags, loading, and the text that comes out, which is mlx-lm's own."""
    engine = start(tiny, adapter=adapter, draft_model=other, context_length=1024)
    eventually(engine.is_ready, within_s=60)
    reply = engine.post("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0)
    found = reply.json["choices"][0]["text"]
    model, tokenizer = module("mlx_lm").load(str(tiny), adapter_path=str(adapter))
    assert found == module("mlx_lm").generate(model, tokenizer, PROMPT, max_tokens=12)
