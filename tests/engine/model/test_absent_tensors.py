"""A rank with the weight files of its own layers only: the arrays of the whole model, and no zeros for what is absent."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.gauges import Gauges
from models import fingerprint, layer_files, model_files, partial_model, weight_headers
from models.model_files import ModelUnusableError
from models.partial_model import AbsentFile, PartialMark
from tests.support.mlx_models import Late, module
from tests.support.model_geometries import BASE, FAMILIES

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

mx = Late("mlx.core")
LAYERS = (3, 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = module("tests.support.tiny_model").make
    out = tmp_path_factory.mktemp("models") / "several"
    return Path(make(out, arch="qwen2", layers=sum(LAYERS), files=6))


def take(
    whole: Path, into: Path, rank: int, *, lacking: str = "", layers: tuple[int, ...] = LAYERS
) -> Path:
    """Make the folder of a rank; `lacking` is a file that it should have."""
    into.mkdir()
    tensors = {path.name: model_files.read_tensors(path) for path in whole.glob("model-*")}
    headers = weight_headers.make_headers((whole / "config.json").read_text(), tensors)
    assert headers is not None
    needed = layer_files.rank_files(headers.weight_map, layers, rank) - {lacking}
    absent = {}
    for path in whole.iterdir():
        if path.suffix == ".safetensors" and path.name not in needed:
            absent[path.name] = AbsentFile(size=path.stat().st_size, sha256="0" * 64)
            continue
        (into / path.name).symlink_to(path)
    assert len(absent) > 1
    mark = PartialMark(absent=absent, headers=weight_headers.pack(headers))
    partial_model.write_mark(into, mark)
    return into


def load(folder: Path, rank: int) -> Any:
    loader, mlx_group = (module(f"engine.model.{name}") for name in ("loader", "mlx_group"))
    facts = partial_model.inspect_rank_model(folder, LAYERS, rank)
    group = module("engine.shape_probe").StubGroup(rank, 2)
    how = mlx_group.ModelSplit(group=group, parallelism="Pipeline", layers=LAYERS)
    return loader.load(
        folder, facts, Gauges(), is_stopping=lambda: False, options=loader.LoadOptions(split=how)
    ).model


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_the_same_arrays_as_with_all_files(
    whole: Path, tmp_path: Path, rank: int
) -> None:
    flatten = module("mlx.utils").tree_flatten
    folder = take(whole, tmp_path / "part", rank)
    expected, found = (dict(flatten(load(path, rank).parameters())) for path in (whole, folder))
    assert expected.keys() == found.keys()
    assert all(mx.array_equal(found[name], array) for name, array in expected.items())
    assert partial_model.inspect_rank_model(folder, LAYERS, rank) == model_files.inspect_model(
        whole
    )


def test_a_missing_file_of_the_rank_is_refused_by_name(whole: Path, tmp_path: Path) -> None:
    lacking = "model-00001-of-00006.safetensors"
    folder = take(whole, tmp_path / "part", 1, lacking=lacking)
    with pytest.raises(ModelUnusableError, match=f"lacks {lacking}, which has layers of rank 1"):
        load(folder, 1)


def test_an_absent_tensor_that_is_read_is_an_error_and_no_zero(whole: Path, tmp_path: Path) -> None:
    lacking = "model-00001-of-00006.safetensors"
    folder = take(whole, tmp_path / "part", 1, lacking=lacking)
    absent = module("engine.model.absent_tensors")
    model, _ = module("mlx_lm.utils").load_model(
        folder, lazy=True, get_model_classes=absent.model_classes(folder)
    )
    with (
        pytest.raises(ModelUnusableError, match="lacks a weight file that this rank reads"),
        absent.reads_explained(folder),
    ):
        mx.eval(model.model.layers[0].parameters())


def test_everything_else_refuses_the_folder(whole: Path, tmp_path: Path) -> None:
    folder = take(whole, tmp_path / "part", 0)
    with pytest.raises(ModelUnusableError, match="only the weight files of one rank") as refused:
        model_files.inspect_model(folder)
    assert refused.value.reason == "ModelPartial"


def test_the_ranks_of_one_stored_model_have_one_fingerprint(whole: Path, tmp_path: Path) -> None:
    """The store names contents by their digest, which stands for the bytes that a rank lacks."""
    blobs = tmp_path / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    digests = {}
    for number, path in enumerate(sorted(whole.glob("model-*"))):
        digests[path.name] = f"{number:064x}"
        (blobs / digests[path.name]).write_bytes(path.read_bytes())
    found = set()
    for name, held in (("all", set(digests)), ("a", set(list(digests)[:2])), ("b", set())):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        for one in held:
            (folder / one).symlink_to(f"../blobs/sha256/{digests[one]}")
        absent = {
            one: AbsentFile(size=1, sha256=digest)
            for one, digest in digests.items()
            if one not in held
        }
        if absent:
            partial_model.write_mark(folder, PartialMark(absent=absent, headers=""))
        found.add(fingerprint.compute(folder, ()))
    assert len(found) == 1


def write_family(folder: Path, family: str, *, bits: int | None) -> Path:
    """Write a model of six layers as its authors publish it, in seven files that cut through layers and experts."""
    config = {**BASE, "model_type": family, **FAMILIES.get(family, {})}
    if bits is not None:
        config |= {"hidden_size": 64, "quantization": {"group_size": 32, "bits": bits}}
    made = module(f"mlx_lm.models.{family}")
    model = made.Model(made.ModelArgs.from_dict(config))
    if bits is not None:
        module("mlx.nn").quantize(model, group_size=32, bits=bits)
    weights = {}
    for name, array in module("mlx.utils").tree_flatten(model.parameters()):
        if ".switch_mlp." not in name:
            weights[name] = array
            continue
        for number in range(array.shape[0]):
            weights[name.replace("switch_mlp", f"experts.{number}")] = array[number]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights, key=lambda name: (layer_files.layer_of(name) is None, name))
    for number in range(7):
        held = names[number * len(names) // 7 : (number + 1) * len(names) // 7]
        path = folder / f"model-{number + 1:05d}-of-00007.safetensors"
        mx.save_safetensors(str(path), {name: weights[name] for name in held})
    return folder


@pytest.mark.parametrize(
    ("family", "bits"),
    [("qwen2", 4), ("qwen3_moe", None), ("deepseek_v2", None), ("deepseek_v3", None)],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_mlx_lm_decides_as_for_the_whole_model(
    family: str, bits: int | None, rank: int, tmp_path: Path
) -> None:
    """Experts that are stacked and matrices that are absorbed may lie in two files, one of them absent."""
    layers = (3, 3)
    whole = write_family(tmp_path / "whole", family, bits=bits)
    folder = take(whole, tmp_path / "part", rank, layers=layers)
    found = []
    for path in (whole, folder):
        model, _ = module("mlx_lm.utils").load_model(
            path,
            lazy=True,
            get_model_classes=module("engine.model.absent_tensors").model_classes(path),
        )
        group = module("engine.shape_probe").StubGroup(rank, 2)
        mlx_group = module("engine.model.mlx_group")
        how = mlx_group.ModelSplit(group=group, parallelism="Pipeline", layers=layers)
        mlx_group.split_model(model, how)
        found.append(dict(module("mlx.utils").tree_flatten(model.parameters())))
    assert found[0].keys() == found[1].keys()
    assert all(mx.array_equal(found[1][name], array) for name, array in found[0].items())
