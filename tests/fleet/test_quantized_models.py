"""A model that one Mac quantized is deployed by its name, and another Mac fetches it and serves it: no hub is there."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.model_store.integrity import check_model
from models.model_store.store import ModelStore
from tests.support.fleet import model_deployment
from tests.support.hub import COMMIT
from tests.support.mlx_models import module
from tests.support.model_store import add_model
from tests.support.two_macs import MARKS, Mac, joined, two_macs

pytestmark = [*MARKS, pytest.mark.mlx, pytest.mark.timeout(400)]

REPO = "fleet/Tiny-1f2e3d4c5b6a-4bit-g64"
MANIFEST = model_deployment(
    "small", model={"hub": {"repo": REPO}}, contextLength=256, concurrency=1
).encode()


@pytest.fixture
async def macs(tmp_path: Path) -> AsyncIterator[tuple[Mac, Mac]]:
    async with two_macs(tmp_path, tmp_path / "none") as (first, second):
        first.models, second.models = tmp_path / "models-1", tmp_path / "models-2"
        yield first, second


async def test_a_mac_serves_what_another_one_quantized(macs: tuple[Mac, Mac]) -> None:
    first, second = macs
    source = module("tests.support.tiny_model").make(first.root / "plain", dtype="bfloat16")
    add_model(
        ModelStore(first.models, SystemClock()),
        "org/Tiny",
        COMMIT,
        {one.name: one.read_bytes() for one in source.iterdir()},
    )
    await first.up()
    await joined(first, second)

    made = await first.ok("models", "quantize", "org/Tiny", "--node", "node-1")
    assert made.startswith("node-1: fleet--Tiny-1f2e3d4c5b6a-4bit-g64@")
    folder = made.split()[1]
    await first.ok("cordon", "node-1", "node-2")
    await first.ok("apply", "-f", "-", stdin=MANIFEST)
    await first.ok("wait", "md/small", "--for=condition=Available", "--timeout=90s")
    endpoints = await first.ok("get", "endpoints", "-o", "jsonpath={.items[*].metadata.name}")
    assert "small" in endpoints
    replicas = await first.ok("get", "replicas", "-o", "yaml")
    assert "node: mac-2" in replicas
    assert COMMIT not in replicas
    copied = ModelStore(second.models, SystemClock())
    assert [model.name for model in copied.models()] == [folder]
    assert check_model(copied, folder, hashes=True) == ()
    said = await first.ok("chat", "small", "-m", "x", "--max-tokens", "4")
    assert said.endswith("\n")
    # The Mac that made it serves it, too, and its file is the one that a person takes away.
    out = first.root / "out"
    await first.run("models", "export", REPO, str(out), "--models-dir", str(first.models))
    assert (out / "quantization_origin.json").is_file()
