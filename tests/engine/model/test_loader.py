"""The model loader: progress, stops, number types, templates that refuse messages, and LoRA adapters."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import PromptRefusedError, StoppedError
from engine.gauges import Gauges
from models import adapter_files, model_files
from models.model_files import ModelUnusableError
from tests.support.engine_adapters import PROMPT, is_same, load_adapted, logits, make_adapter
from tests.support.engine_batches import PROMPTS, drain, job, load, new_batch
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def test_progress_is_visible_while_loading(tiny: Path) -> None:
    gauges = Gauges()
    load(tiny, gauges)
    assert gauges.loaded_bytes == gauges.total_bytes == model_files.inspect_model(tiny).weight_bytes
    assert gauges.active_bytes > 0


def test_loading_stops_on_request(tiny: Path) -> None:
    loader = module("engine.model.loader")
    facts = model_files.inspect_model(tiny)
    with pytest.raises(StoppedError):
        loader.load(tiny, facts, Gauges(), is_stopping=lambda: True)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS computes in the weights' own type")
@pytest.mark.parametrize("is_quantized", [True, False])
def test_half_precision_becomes_float32_on_linux(tmp_path: Path, *, is_quantized: bool) -> None:
    mx, tree_flatten = module("mlx.core"), module("mlx.utils").tree_flatten
    folder = module("tests.support.tiny_model").make(tmp_path / "half", dtype="float16")
    if is_quantized:
        packed = tmp_path / "packed"
        options = {"quantize": True, "q_group_size": 32, "dtype": "float16"}
        module("mlx_lm").convert(str(folder), str(packed), **options)
        folder = packed
    loaded = load(folder)
    kinds = {array.dtype for _, array in tree_flatten(loaded.model.parameters())}
    assert kinds == ({mx.float32, mx.uint32} if is_quantized else {mx.float32})
    batch = new_batch(loaded, folder)
    batch.add(job(0, PROMPTS[1]))
    assert len(drain(batch)[0]) > 0


def test_a_template_that_refuses_messages_is_a_client_error(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "strict")
    path = folder / "tokenizer_config.json"
    template = "{{ raise_exception('roles must alternate') }}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    codec = load(folder).codec
    with pytest.raises(PromptRefusedError, match="roles must alternate"):
        codec.encode_chat([{"role": "user", "content": "x"}])


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


def test_adapter_bytes_are_loaded_and_match_the_agents_report(tiny: Path, adapter: Path) -> None:
    plain, with_adapter = Gauges(), Gauges()
    load_adapted(tiny, gauges=plain)
    load_adapted(tiny, adapter, gauges=with_adapter)
    size = adapter_files.inspect_adapter(adapter).bytes_in_memory(casts_to_float32=False)
    assert with_adapter.loaded_bytes == with_adapter.total_bytes == plain.loaded_bytes + size


def test_half_precision_of_an_adapter_is_widened_on_linux(tiny: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "law", tiny, dtype="bfloat16")
    model = load_adapted(tiny, folder).model
    arrays = module("mlx.utils").tree_flatten(model.parameters())
    kinds = {str(array.dtype) for name, array in arrays if ".lora_" in name}
    assert kinds == (
        {"mlx.core.float32"} if module("sys").platform == "linux" else {"mlx.core.bfloat16"}
    )


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
