"""Split options of a model: the answers of a child process for real folders, the reports, and the stored answers."""

import gc
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from machinery.clock import SystemClock
from models import cache_rules, footprint, inspection, model_files, split_options, weight_headers
from models.footprint import ServingLoad
from models.hf_config import ModelConfig
from models.split_options import SplitFailure, SplitInspector, SplitShapes, SplitWeights
from models.weight_headers import WeightHeaders
from schemas.node import ModelGeometry, SplitOptions
from tests.support import tiny_model
from tests.support.model_geometries import BASE, FAMILIES, build, geometry, module
from tests.support.values import present

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

# Six heads and six KV heads: over four ranks mlx-lm goes on without a complaint, with one head of another size.
SIX = {
    "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 192,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], *, bits: int | None = None) -> Path:
    """Write a model of random weights."""
    mx, nn, utils = module("mlx.core"), module("mlx.nn"), module("mlx.utils")
    made = module(f"mlx_lm.models.{config['model_type']}")
    model = made.Model(made.ModelArgs.from_dict(config))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config = config | {"quantization": {"group_size": 32, "bits": bits}}
    folder.mkdir(parents=True)
    weights = dict(utils.tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def find_out() -> Callable[[Path], SplitShapes]:
    """Look in this process: a child would import for seconds, each time."""
    child = module("engine.shape_probe")

    def found(folder: Path) -> SplitShapes:
        mx = module("mlx.core")
        before = mx.default_device()
        try:
            return SplitShapes.model_validate_json(json.dumps(child.probe_splits(folder)))
        finally:
            mx.set_default_device(before)
            mx.enable_compile()

    return found


CASES: list[tuple[str, dict[str, Any], tuple[int, ...], int]] = [
    ("llama", {}, (2,), 0), ("llama", SIX, (2, 3, 6), 0), ("qwen2", SIX, (2, 3, 6), 6),
    ("qwen3_moe", {}, (2,), 6), ("gpt_oss", {}, (2,), 0),
    # A latent belongs to no head: the heads alone decide.
    ("deepseek_v3", {}, (2, 4), 6),
    ("deepseek_v2", {}, (2, 4), 6),
    ("qwen3_next", {}, (), 6), ("gemma3_text", {}, (), 0), ("phi3", {}, (), 0),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "tensor", "layers"), CASES)
def test_sizes_are_those_that_mlx_lm_can_divide(
    family: str,
    changes: dict[str, Any],
    tensor: tuple[int, ...],
    layers: int,
    tmp_path: Path,
    find_out: Callable[[Path], SplitShapes],
) -> None:
    config = {**BASE, "model_type": family, **FAMILIES.get(family, {}), **changes}
    out = find_out(write(tmp_path / "model", config))
    assert tuple(out.tensor) == tensor
    assert len(out.layers) == layers
    if tensor:
        assert sorted([*out.tensor, *out.refused]) == list(range(2, 17))
    if changes == SIX:
        assert out.refused[4] == "4 does not divide 6 attention heads"


def headers_of(folder: Path) -> WeightHeaders:
    """Return the headers of a folder, as the reconciler reads them from a hub."""
    files = {path.name: model_files.read_tensors(path) for path in folder.glob("*.safetensors")}
    return present(weight_headers.make_headers((folder / "config.json").read_text(), files))


@pytest.mark.parametrize("bits", [None, 4])
def test_headers_alone_give_the_answer_of_the_whole_model(
    bits: int | None, tmp_path: Path, find_out: Callable[[Path], SplitShapes]
) -> None:
    config = {**BASE, "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256}
    folder = write(tmp_path / "model", config, bits=bits)
    headers = headers_of(folder)
    skeleton = tmp_path / "skeleton"
    skeleton.mkdir()
    (skeleton / "config.json").write_text(headers.config)
    weight_headers.write_skeleton(
        skeleton / "model.safetensors", headers.files["model.safetensors"]
    )
    assert find_out(skeleton) == find_out(folder)


def test_groups_of_packed_weights_are_not_torn(
    tmp_path: Path, find_out: Callable[[Path], SplitShapes]
) -> None:
    config = {**BASE, "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 4}
    out = find_out(write(tmp_path / "model", config | {"intermediate_size": 96}, bits=4))
    # 96 wide over two ranks is 48, and 32 numbers are packed together.
    assert tuple(out.tensor) == ()
    assert "quantization group size 32" in out.refused[2]
    assert len(out.layers) == 6


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_reported_weights_are_those_that_ranks_load(
    rank: int, bits: int | None, tmp_path: Path, find_out: Callable[[Path], SplitShapes]
) -> None:
    """Shares that are read into memory, by the calls of a real rank."""
    mx, utils = module("mlx.core"), module("mlx_lm.utils")
    group = module("engine.shape_probe").StubGroup(rank, 2)
    config = {**BASE, "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256}
    folder = write(tmp_path / "model", config, bits=bits)
    out = find_out(folder)

    def held(split: Callable[[Any], None]) -> int:
        model, _ = utils.load_model(folder, lazy=True)
        split(model)
        gc.collect()
        mx.clear_cache()  # a buffer that is used again counts whole, however little of it is needed
        before = mx.get_active_memory()
        mx.eval(model.parameters())
        gc.collect()
        return int(mx.get_active_memory() - before)

    # What mlx takes for an array is rounded; and slices that might be kept with all of their array need not be.
    share = held(lambda model: model.shard(group))
    assert 0.9 < share / out.tensor[2].total_bytes < 1.01
    run = held(lambda model: model.model.pipeline(group, split=[2, 4]))
    own = out.layers[4:] if rank == 0 else out.layers[:4]
    said = out.rest.total_bytes + sum(layer.total_bytes for layer in own)
    assert 0.99 < run / said < 1.01


QWEN35 = {"text_config": {**BASE, **FAMILIES["qwen3_next"], "model_type": "qwen3_5_text"}}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_5"])
def test_the_cache_of_a_rank_is_as_large_as_the_proof(family: str) -> None:
    child = module("engine.shape_probe")
    config = {**BASE, "model_type": family, **FAMILIES.get(family, {})}
    config |= QWEN35 if family == "qwen3_5" else {}
    group = child.StubGroup(0, 2)
    model = build(config)
    model.shard(group)
    # As many tokens as a cache grows by at once.
    kept = child.trace(model, group, tokens=256).caches
    real = sum(4 * math.prod(shape) for layer in kept for shape in layer)
    shape = geometry(config).model_copy(update={"prefill_step": 0})
    use = ServingLoad(context_length=256, concurrency=1, ranks=2)
    if family == "gpt_oss":  # a window of 100 tokens holds all that were read at once
        shape = shape.model_copy(
            update={
                "groups": tuple(
                    layer_group.model_copy(update={"window": 256}) for layer_group in shape.groups
                )
            }
        )
    assert footprint.cache_bytes(shape, use) == real


HEADS: list[tuple[tuple[int, int], tuple[int, int], int, str]] = [
    ((8, 4), (4, 2), 2, ""),
    ((8, 1), (4, 1), 2, ""),  # a latent, whole on every rank
    ((8, 2), (2, 1), 4, ""),  # KV heads that several ranks have
    ((8, 2), (8, 2), 2, "2 does not divide 8 attention heads"),  # attention that is not split at all
    ((9, 3), (4, 1), 2, "2 does not divide 9 attention heads"),
    ((8, 3), (2, 1), 4, "4 does not divide 3 KV heads"),
]  # fmt: skip


@pytest.mark.parametrize(("whole", "share", "size", "words"), HEADS)
def test_heads_are_distinguished(
    whole: tuple[int, int], share: tuple[int, int], size: int, words: str
) -> None:
    def shapes(heads: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        queries, keys = heads
        return (1, queries, 5, 16), (1, keys, 5, 16), (1, keys, 5, 16)

    complaint = module("engine.shape_probe").head_mismatch
    assert complaint(shapes(whole), shapes(share), size) == words


def facts_of(config: dict[str, Any], folder: Path) -> model_files.ModelFacts:
    return model_files.inspect_model(write(folder / "model", config))


def test_a_report_says_why_a_size_is_refused(tmp_path: Path) -> None:
    facts = facts_of({**BASE, "model_type": "llama"}, tmp_path)
    geometry = model_files.model_geometry(facts, casts_to_float32=True)
    split_shapes = SplitShapes(
        tensor={2: SplitWeights(total_bytes=100, half_bytes=60)},
        refused={3: "no", 4: "[quantize] too narrow"},
        layers=(SplitWeights(total_bytes=10, half_bytes=10),) * 6,
        rest=SplitWeights(total_bytes=5, half_bytes=1),
    )
    wide = split_options.splitting_report(facts, geometry, split_shapes, casts_to_float32=True)
    assert wide == SplitOptions(
        tensor=(2,),
        tensor_bytes=(160,),
        is_pipelined=True,
        layer_bytes=(20,) * 6,
        rest_bytes=6,
        layer_groups=(0,) * 6,
        basis="llama, 4 heads, 2 KV heads",
    )
    narrow = present(
        split_options.splitting_report(facts, geometry, split_shapes, casts_to_float32=False)
    )
    assert (narrow.tensor_bytes, narrow.rest_bytes) == ((100,), 5)
    torn = split_shapes.model_copy(update={"tensor": {}, "refused": {2: "[quantize] too narrow"}})
    said = present(split_options.splitting_report(facts, geometry, torn, casts_to_float32=False))
    assert said.basis == "llama, 4 heads, 2 KV heads (with 2: [quantize] too narrow)"
    failed = split_options.splitting_report(
        facts, geometry, SplitFailure(why="no"), casts_to_float32=False
    )
    assert failed == SplitOptions(basis="llama", unknown="no")
    assert split_options.splitting_report(facts, geometry, None, casts_to_float32=False) is None


@pytest.mark.parametrize(("family", "order"), [
    ("llama", (0,) * 6), ("deepseek_v3", (0,) * 6),
    ("qwen3_next", (0, 0, 0, 1, 0, 0)),
    ("gpt_oss", (1, 0, 1, 0, 1, 0)),
    # Layers that share caches, keep nothing, or keep two things, are not listed one by one.
    ("gemma4_text", ()), ("nemotron_h", ()),
])  # fmt: skip
def test_layers_are_distinguished(family: str, order: tuple[int, ...]) -> None:
    config = ModelConfig.model_validate({**BASE, "model_type": family, **FAMILIES[family]})
    found = cache_rules.layer_order(family, config.text, element_bytes=4)
    groups = cache_rules.layer_groups(family, config.text, element_bytes=4)
    assert found == order
    if order:
        assert [found.count(at) for at in range(len(groups))] == [group.count for group in groups]


async def told(folder: Path, splitter: SplitInspector) -> ModelGeometry:
    """Return the report of a folder once its splitting is known."""
    clock = SystemClock()
    until = clock.monotonic() + 90.0
    while clock.monotonic() < until:
        geometry = present(
            inspection.report_model(
                str(folder), Path("/unused"), casts_to_float32=True, splits=splitter
            ).geometry
        )
        if geometry.splitting is not None:
            return geometry
        assert splitter.is_inspecting()
        await clock.sleep(0.1)
    raise AssertionError("nothing was found out")


@pytest.mark.ci
async def test_a_child_runs_once_and_its_answer_outlives_the_agent(tmp_path: Path) -> None:
    folder = tiny_model.make(tmp_path / "tiny", arch="qwen2", heads=4, kv_heads=2, layers=3)
    path = tmp_path / "kept"
    geometry = await told(folder, SplitInspector(path, SystemClock()))
    assert geometry.splitting is not None
    assert geometry.splitting.tensor == (2,)
    assert len(geometry.splitting.layer_bytes) == 3
    weighed = sum(geometry.splitting.layer_bytes) + geometry.splitting.rest_bytes
    assert weighed == geometry.weights_bytes
    # The next agent has it at once; another version of the model is another question.
    facts, later = model_files.inspect_model(folder), SplitInspector(path, SystemClock())
    assert isinstance(later.inspect(folder, facts), SplitShapes)
    assert not later.is_inspecting()
    # A Mac that has the headers only asks the same question.
    headers = weight_headers.pack(headers_of(folder))
    assert isinstance(later.inspect(tmp_path / "not-fetched", facts, headers), SplitShapes)
    assert isinstance(later.inspect(folder, facts, "broken"), SplitFailure)
    [file] = path.glob("*.json")
    # What a disk lost is asked for anew.
    file.write_text("{")
    assert await told(folder, SplitInspector(path, SystemClock())) == geometry


@pytest.mark.ci
async def test_the_error_of_mlx_lm_is_reported(tmp_path: Path) -> None:
    folder = tiny_model.make(tmp_path / "tiny", arch="llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "odd"}}))
    splitter = SplitInspector(tmp_path / "kept", SystemClock())
    geometry = await told(folder, splitter)
    assert geometry.splitting is not None
    assert "odd" in geometry.splitting.unknown
    assert not splitter.is_inspecting()  # not again before a while has passed
    assert geometry.splitting.tensor == ()


@pytest.mark.ci
def test_a_child_ends_with_its_agent(tmp_path: Path) -> None:
    folder = tiny_model.make(tmp_path / "tiny")
    argv = [sys.executable, "-m", "engine.shape_probe", str(folder)]
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = subprocess.run([*argv, str(gone.pid)], capture_output=True, timeout=90, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.decode().splitlines()[-1] == "its parent has ended"
