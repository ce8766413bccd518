"""A node's report of a LoRA adapter folder: its size, or the error in it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given

from models import inspection
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


def as_peft(folder: Path) -> None:
    configure(peft_type="LORA", r=8, lora_parameters=None, fine_tune_type=None)(folder)
    (folder / "adapters.safetensors").rename(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
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
        (as_peft, "is in PEFT's format, which mlx-lm does not read; merge it"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    found = report(folder)
    assert (found.reason, found.weights_bytes) == ("AdapterUnusable", 0)
    assert found.message.startswith("adapter: ")
    assert re.search(message, found.message), found.message


@pytest.mark.parametrize("path", ["nowhere", "adapter_config.json", "x" * 300, "a\u0000b"])
def test_a_path_that_leads_nowhere(folder: Path, path: str) -> None:
    found = inspection.report_adapter(path, folder, casts_to_float32=False)
    assert (found.path, found.reason) == (path, "AdapterNotFound")


def test_each_path_is_reported_once_in_order(folder: Path) -> None:
    found = inspection.report_adapters(["law", "b", "b"], folder.parent, casts_to_float32=False)
    assert [(one.path, one.reason) for one in found] == [("b", "AdapterNotFound"), ("law", "")]


@given(config_bytes=configs, weights_bytes=files)
def test_nothing_on_disk_is_worse_than_unusable(config_bytes: bytes, weights_bytes: bytes) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_bytes(config_bytes)
        (folder / "adapters.safetensors").write_bytes(weights_bytes)
        found = report(folder)
    assert found.reason
    assert found.message
