"""Models of Ollama's MLX engine: what mlx-lm reads after the import is what mlx-lm itself would have quantized."""

import json
from pathlib import Path
from typing import Any

import pytest

from machinery.clock import SystemClock
from models.model_files import inspect_model
from models.model_store.cache_import import ImportRefusedError
from models.model_store.integrity import check_model
from models.model_store.ollama_models import find_ollama_models, import_ollama_model
from models.model_store.store import ModelStore
from tests.support.commands import run_module
from tests.support.gguf_files import write_gguf
from tests.support.model_folders import safetensors
from tests.support.model_store import files_below
from tests.support.ollama_store import GGUF, TENSOR, add_blob, add_jsons, add_manifest

CONFIG = b'{"model_type": "llama"}'


def plain_layers(root: Path, *, weights: bytes | None = None) -> list[dict[str, Any]]:
    content = safetensors({"a": ("F32", 0, 400)}) if weights is None else weights
    return [add_blob(root, TENSOR, "a", content), *add_jsons(root, {"config.json": CONFIG})]


@pytest.mark.ci
@pytest.mark.timeout(120)
async def test_an_imported_model_computes_what_mlx_lm_computes(
    tmp_path: Path, models_dir: Path
) -> None:
    root, expected = tmp_path / "ollama", tmp_path / "expected.safetensors"
    helper = "tests.support.ollama_mlx"
    await run_module(helper, "write", str(models_dir / "tiny"), str(root), str(expected))
    before = files_below(root)
    (ollama_model,) = find_ollama_models(root)
    assert (ollama_model.name, ollama_model.repo, ollama_model.problem) == (
        "tiny:4b-mlx",
        "ollama/tiny-4b-mlx",
        "",
    )
    store = ModelStore(tmp_path / "store", SystemClock())
    model = import_ollama_model(store, ollama_model)
    await run_module(helper, "compare", str(model.folder), str(expected))
    config = json.loads((model.folder / "config.json").read_bytes())
    assert config["quantization"]["group_size"] in (32, 64)
    assert inspect_model(model.folder).weight_bytes > 0
    assert check_model(store, model.name, hashes=True) == ()
    assert files_below(root) == before
    assert import_ollama_model(store, ollama_model).name == model.name
    assert list(store.incoming.iterdir()) == []


def test_names_have_the_namespace_and_the_tag(tmp_path: Path) -> None:
    for name in ("library/tiny/latest", "library/tiny/4b", "anna/tiny/latest"):
        add_manifest(tmp_path, name, plain_layers(tmp_path))
    found = {model.name: model.repo for model in find_ollama_models(tmp_path)}
    assert found == {
        "anna/tiny:latest": "anna/tiny",
        "tiny:4b": "ollama/tiny-4b",
        "tiny:latest": "ollama/tiny",
    }


def test_a_model_without_quantization_is_imported_with_its_own_config(tmp_path: Path) -> None:
    add_manifest(tmp_path / "o", "library/tiny/latest", plain_layers(tmp_path / "o"))
    (ollama_model,) = find_ollama_models(tmp_path / "o")
    model = import_ollama_model(ModelStore(tmp_path / "store", SystemClock()), ollama_model)
    assert files_below(model.folder).keys() == {"config.json", "model.safetensors"}
    assert (model.folder / "config.json").read_bytes() == CONFIG


def test_a_gguf_model_is_converted_after_its_digest_was_compared(
    tmp_path: Path, models_dir: Path
) -> None:
    content = write_gguf(tmp_path / "tiny.gguf", models_dir / "tiny", "Q8_0").read_bytes()
    layer = add_blob(tmp_path, GGUF, "", content)
    add_manifest(tmp_path, "library/llama3/latest", [layer])
    (ollama_model,) = find_ollama_models(tmp_path)
    assert (ollama_model.size_bytes, ollama_model.problem) == (len(content), "")
    store = ModelStore(tmp_path / "store", SystemClock())
    model = import_ollama_model(store, ollama_model)
    assert (model.repo, check_model(store, model.name, hashes=True)) == ("ollama/llama3", ())
    ollama_model.blob(ollama_model.layers[0]).write_bytes(content[:-1] + b"x")
    with pytest.raises(ImportRefusedError, match="is damaged: its content is sha256:"):
        import_ollama_model(store, ollama_model)


def test_a_gguf_model_with_an_adapter_says_why_it_cannot_be_imported(tmp_path: Path) -> None:
    kinds = (GGUF, "application/vnd.ollama.image.adapter")
    add_manifest(tmp_path, "library/a/b", [add_blob(tmp_path, kind, "", b"G") for kind in kinds])
    (ollama_model,) = find_ollama_models(tmp_path)
    assert "put together of several GGUF files" in ollama_model.problem


@pytest.mark.parametrize("damage", ["changed", "absent", "cut"])
def test_damaged_layer_is_refused_by_name_and_leaves_no_model(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "o"
    content = safetensors({"a": ("F32", 0, 400)})
    layers = plain_layers(root, weights=content[:-5] if damage == "cut" else content)
    add_manifest(root, "library/tiny/latest", layers)
    blob = root / "blobs" / layers[0]["digest"].replace(":", "-")
    if damage == "changed":
        blob.write_bytes(content[:-1] + b"x")
    elif damage == "absent":
        blob.unlink()
    (model,) = find_ollama_models(root)
    store = ModelStore(tmp_path / "store", SystemClock())
    why = {"changed": "a is damaged", "absent": "a is not there", "cut": "was cut short"}[damage]
    with pytest.raises(ImportRefusedError, match=f"tiny:latest: .*{why}"):
        import_ollama_model(store, model)
    assert store.models() == ()


def test_packed_experts_and_unknown_quantizations_are_refused(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", SystemClock())
    jsons = add_jsons(tmp_path, {"config.json": CONFIG})
    experts = add_blob(tmp_path, TENSOR, "layers.0.mlp.experts", safetensors())
    add_manifest(tmp_path, "library/moe/latest", [experts, *jsons])
    header = json.dumps({
        "__metadata__": {"quant_type": "q9"},
        "a": {"dtype": "U32", "shape": [1], "data_offsets": [0, 4]},
    }).encode()  # fmt: skip
    packed = len(header).to_bytes(8, "little") + header + bytes(4)
    add_manifest(
        tmp_path, "library/other/latest", [add_blob(tmp_path, TENSOR, "a", packed), *jsons]
    )
    moe, other = find_ollama_models(tmp_path)
    with pytest.raises(ImportRefusedError, match="mixture of experts"):
        import_ollama_model(store, moe)
    with pytest.raises(ImportRefusedError, match="packed as 'q9'"):
        import_ollama_model(store, other)


def test_a_manifest_of_another_form_is_left_out(tmp_path: Path) -> None:
    path = add_manifest(tmp_path, "library/tiny/latest", plain_layers(tmp_path))
    for content in ("", "[]", '{"layers": [{"mediaType": "x", "digest": "../../etc", "size": 1}]}'):
        path.write_text(content)
        assert find_ollama_models(tmp_path) == ()
