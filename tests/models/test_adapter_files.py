"""A node's report of a LoRA adapter folder: its size, or the error in it."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given

from models import adapter_files, inspection
from schemas.node import AdapterReport
from tests.support.model_folders import ADAPTER_CONFIG as CONFIG
from tests.support.model_folders import ADAPTER_TENSORS as TENSORS
from tests.support.model_folders import configs, files, safetensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "law"
    made.mkdir()
    (made / "adapter_config.json").write_text(json.dumps(CONFIG))
    (made / "adapters.safetensors").write_bytes(safetensors(TENSORS))
    return made


def report(folder: Path, *, casts: bool = False) -> AdapterReport:
    return inspection.report_adapter(str(folder), Path("/unused"), casts_to_float32=casts)


def configure(**changes: Any) -> Callable[[Path], object]:
    tree = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    return lambda folder: (folder / "adapter_config.json").write_text(json.dumps(tree))


def weigh(
    tensors: dict[str, tuple[str, int, int]], *, missing: int = 0
) -> Callable[[Path], object]:
    data = safetensors(tensors, missing=missing)
    return lambda folder: (folder / "adapters.safetensors").write_bytes(data)


def test_its_size_is_that_of_its_weights_in_memory(folder: Path) -> None:
    assert report(folder) == AdapterReport(path=str(folder), weights_bytes=600)
    assert report(folder, casts=True).weights_bytes == 800


@pytest.mark.parametrize("kind", [None, "lora", "dora"])
def test_kinds_of_adapters(folder: Path, kind: str | None) -> None:
    configure(fine_tune_type=kind)(folder)
    assert report(folder).reason == ""


def lora(**changes: Any) -> Callable[[Path], object]:
    return configure(lora_parameters=CONFIG["lora_parameters"] | changes)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json: not an adapter"),
    (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json: content:"),
    (lambda f: (f / "adapters.safetensors").unlink(), "has no adapters.safetensors: no weights"),
    (weigh(TENSORS, missing=1), "was cut short"),
    (weigh({}), "has no tensors"),
    (weigh({"lm_head.weight": ("F32", 0, 4)}), "1 tensors that are not part of an adapter, first lm_head.weight"),
    (configure(fine_tune_type="full"), "a fine-tune of type 'full'.*fuse it with mlx_lm.fuse"),
    (configure(num_layers=None), "num_layers: Field required"),
    (configure(lora_parameters=None), "lora_parameters: Field required"),
    (lora(rank=0), "lora_parameters.rank: "),
    (lora(scale="big"), "lora_parameters.scale: "),
    (lora(dropout=1.0), "lora_parameters.dropout: "),
    (lora(keys=[1]), "lora_parameters.keys.0: "),
])  # fmt: skip
def test_what_is_broken_is_named(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    adapter_report = report(folder)
    assert (adapter_report.reason, adapter_report.weights_bytes) == ("AdapterUnusable", 0)
    assert adapter_report.message.startswith("adapter: ")
    assert re.search(message, adapter_report.message), adapter_report.message


@pytest.mark.parametrize("path", ["nowhere", "adapter_config.json", "x" * 300, "a\u0000b"])
def test_a_path_that_leads_nowhere(folder: Path, path: str) -> None:
    adapter_report = inspection.report_adapter(path, folder, casts_to_float32=False)
    assert (adapter_report.path, adapter_report.reason) == (path, "AdapterNotFound")


def test_each_path_is_reported_once_in_order(folder: Path) -> None:
    reports = inspection.report_adapters(["law", "b", "b"], folder.parent, casts_to_float32=False)
    assert [(adapter_report.path, adapter_report.reason) for adapter_report in reports] == [
        ("b", "AdapterNotFound"),
        ("law", ""),
    ]


@pytest.mark.parametrize("weights", ["adapters.safetensors", "adapter_model.safetensors"])
@given(config_bytes=configs, weights_bytes=files)
def test_nothing_on_disk_is_worse_than_unusable(
    weights: str, config_bytes: bytes, weights_bytes: bytes
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_bytes(config_bytes)
        (folder / weights).write_bytes(weights_bytes)
        adapter_report = report(folder)
    assert adapter_report.reason
    assert adapter_report.message


PEFT: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
SHAPES = {f"{LAYER}.lora_A.weight": [4, 64], f"{LAYER}.lora_B.weight": [32, 4]}


def write_tensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for width in shape:
            size *= width
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def peft(path: Path, shapes: dict[str, list[int]] = SHAPES, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(PEFT | changes))
    write_tensors(path / "adapter_model.safetensors", shapes)
    return path


def test_pefts_format_becomes_the_same_form(tmp_path: Path) -> None:
    facts = adapter_files.inspect_adapter(peft(tmp_path / "law"))
    (layer,) = facts.layers
    assert (facts.format, facts.rank, facts.is_dora) == ("PEFT", 4, False)
    assert (layer.name, layer.rank, layer.scale) == ("model.layers.0.self_attn.q_proj", 4, 2.0)
    assert {layer.a, layer.b} == set(SHAPES)
    assert report(tmp_path / "law") == AdapterReport(
        path=str(tmp_path / "law"), weights_bytes=(4 * 64 + 32 * 4) * 4
    )


def test_mlx_lms_format_becomes_that_form(folder: Path) -> None:
    (layer,) = adapter_files.inspect_adapter(folder).layers
    assert (layer.name, layer.rank, layer.scale) == ("model.layers.0.self_attn.q_proj", 4, 20.0)


@pytest.mark.parametrize(("config", "scale"), [
    ({"use_rslora": True}, 4.0),
    ({"r": 8, "rank_pattern": {"q_proj": 4}}, 2.0),
    ({"alpha_pattern": {"k_proj": 1, "layers.0.self_attn.q_proj": 16, "q_proj": 1}}, 4.0),
    ({"init_lora_weights": "gaussian", "modules_to_save": [], "unknown": 1}, 2.0),
])  # fmt: skip
def test_the_scale_of_a_peft_layer(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    (layer,) = adapter_files.inspect_adapter(peft(tmp_path / "law", **config)).layers
    assert layer.scale == scale


@pytest.mark.parametrize(("config", "message"), [
    ({"peft_type": "LOHA"}, "a PEFT adapter of type LOHA, and only LORA is supported"),
    ({"use_dora": True}, "has use_dora .DoRA has a magnitude.*merge_and_unload"),
    ({"bias": "all"}, "has bias: 'all' .biases are trained, too"),
    ({"lora_bias": True}, "has lora_bias"),
    ({"modules_to_save": ["lm_head"]}, "has modules_to_save .whole layers are trained"),
    ({"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights: 'pissa_niter_4'"),
    ({"layer_replication": [[0, 4]]}, "has layer_replication"),
    ({"target_parameters": ["experts"]}, "has target_parameters"),
    ({"alora_invocation_tokens": [1]}, "has alora_invocation_tokens"),
    ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern has the regular expression"),
    ({"r": 8}, "has rank 4, and the config says r: 8"),
    ({"r": 0}, "adapter_config.json: r: "),
    ({"r": None}, "adapter_config.json: r: "),
    ({"lora_alpha": "inf"}, "adapter_config.json: lora_alpha: "),
])  # fmt: skip
def test_what_is_not_supported_of_peft_is_named(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    adapter_report = report(peft(tmp_path / "law", **config))
    assert adapter_report.reason == "AdapterUnusable"
    assert re.search(message, adapter_report.message), adapter_report.message


@pytest.mark.parametrize(("shapes", "message"), [
    ({}, "has no tensors"),
    ({f"{LAYER}.lora_A.weight": [4, 64]}, "has no base_model.*q_proj.lora_B.weight"),
    (SHAPES | {f"{LAYER}.lora_B.weight": [32, 8]}, r"shapes \(4, 64\) and \(32, 8\)"),
    (SHAPES | {f"{LAYER}.lora_B.weight": [32]}, r"shapes \(4, 64\) and \(32,\)"),
    (SHAPES | {f"{LAYER}.lora_magnitude_vector": [32]}, "1 tensors that are not part of"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": [4, 512]}, "adapts the embedding"),
    ({"base_model.model.lm_head.weight": [512, 64]}, "1 tensors that are not part of an adapter"),
])  # fmt: skip
def test_broken_tensors_of_peft_are_named(
    tmp_path: Path, shapes: dict[str, list[int]], message: str
) -> None:
    adapter_report = report(peft(tmp_path / "law", shapes))
    assert adapter_report.reason == "AdapterUnusable"
    assert re.search(message, adapter_report.message), adapter_report.message


def test_files_of_peft_that_are_missing_or_pickled(tmp_path: Path) -> None:
    folder = peft(tmp_path / "law")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "is a pickle, which can run code" in report(folder).message
    (folder / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors: no weights" in report(folder).message
