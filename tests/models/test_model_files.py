"""A node's report of a model folder: its geometry, or the error in it."""

import json
import os
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import inspection, model_files
from models.model_files import ModelUnusableError
from schemas.node import ModelReport
from tests.support.model_folders import CONFIG, configs, files, safetensors
from tests.support.values import present


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "model.safetensors").write_bytes(safetensors())
    return made


def configure(folder: Path, **changes: Any) -> None:
    tree = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(tree))


def report(folder: Path, *, casts: bool = False) -> ModelReport:
    return inspection.report_model(str(folder), Path("/unused"), casts_to_float32=casts)


def test_geometry(folder: Path) -> None:
    geometry = present(report(folder).geometry)
    layer = {"kv_heads": 2, "head_dim": 16, "value_dim": 16, "latent_dim": 0, "window": 0}
    assert geometry.model_dump() == {
        "model_type": "qwen3", "weights_bytes": 600, "layers": 2, "kv_heads": 2, "head_dim": 16, "kv_element_bytes": 2,
        "vocab_size": 512, "max_context": 4096, "groups": ({"kind": "Full", "count": 2, "state_bytes": 0, **layer},),
        "replicated_bytes": 0, "parameters": 2, "hidden_size": 64, "ffn_size": 0, "heads": 4, "prefill_batch": 1,
        "prefill_step": 2048, "is_attention_fused": False, "has_mtp_head": False, "unknown": "", "splitting": None,
        "expert_bytes": 0, "experts": 0, "experts_of_token": 0, "looked_up_bytes": 0, "vision": None,
        "work_bytes": 0,
    }  # fmt: skip


def test_a_header_without_metadata(folder: Path) -> None:
    """The metadata that mlx writes if it is given none."""
    header = b'{"__metadata__":null,"a":{"data_offsets":[0,8],"dtype":"F32","shape":[2]}}'
    data = struct.pack("<Q", len(header)) + header + bytes(8)
    (folder / "model.safetensors").write_bytes(data)
    geometry = present(report(folder).geometry)
    assert geometry.weights_bytes == 8


FULL = {"a": ("F32", 0, 400)}


@pytest.mark.parametrize(("tensors", "casts", "sizes"), [(None, True, (800, 4)), (FULL, True, (400, 4)), (FULL, False, (400, 4))])  # fmt: skip
def test_half_precision_doubles_where_it_is_widened(
    folder: Path,
    tensors: dict[str, tuple[str, int, int]] | None,
    casts: bool,
    sizes: tuple[int, int],
) -> None:
    if tensors is not None:
        (folder / "model.safetensors").write_bytes(safetensors(tensors))
    geometry = present(report(folder, casts=casts).geometry)
    assert (geometry.weights_bytes, geometry.kv_element_bytes) == sizes


def test_multimodal_models_keep_their_numbers_inside(folder: Path) -> None:
    inner = {k: v for k, v in CONFIG.items() if k != "model_type"}
    tree = {"model_type": "qwen3_vl", "vocab_size": 1000, "text_config": inner}
    (folder / "config.json").write_text(json.dumps(tree))
    geometry = present(report(folder).geometry)
    assert (geometry.model_type, geometry.vocab_size, geometry.layers) == ("qwen3_vl", 1000, 2)


@pytest.mark.parametrize(("changes", "kv_heads", "head_dim"), [
    ({"num_key_value_heads": None}, 4, 16),
    ({"head_dim": 128}, 2, 128),
    ({"hidden_size": None, "head_dim": 32}, 2, 32),
])  # fmt: skip
def test_what_config_leaves_out_is_derived(
    folder: Path, changes: dict[str, Any], kv_heads: int, head_dim: int
) -> None:
    configure(folder, **changes)
    geometry = present(report(folder).geometry)
    assert (geometry.kv_heads, geometry.head_dim) == (kv_heads, head_dim)


def test_an_unknown_architecture_is_reported_and_not_guessed(folder: Path) -> None:
    """The reconciler then asks a person (spec.resources.memory); the model itself may be fine."""
    for changes, words in (
        ({"num_hidden_layers": None}, "config.json lacks num_hidden_layers"),
        ({"vocab_size": None}, "config.json lacks vocab_size"),
        ({"model_type": "gear"}, "no rule says how large the cache of a gear model is"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"]}, "has 1 layer_types for 2"),
    ):
        configure(folder, **changes)
        geometry = present(report(folder).geometry)
        assert words in geometry.unknown
        assert geometry.weights_bytes == 600


def test_an_architecture_that_mlx_lm_does_not_have_is_refused(folder: Path) -> None:
    for strange in ("nonsense", "../../etc", "x" * 5000):
        configure(folder, model_type=strange)
        model_report = report(folder)
        assert (model_report.geometry, model_report.reason) == (None, "ArchitectureUnsupported")
        assert "on this node has no architecture" in model_report.message


def test_a_context_that_the_config_does_not_say_is_not_limited(folder: Path) -> None:
    configure(folder, max_position_embeddings=None)
    geometry = present(report(folder).geometry)
    assert (geometry.max_context, geometry.unknown) == (None, "")


def index(folder: Path, *files: str) -> None:
    tree = {"weight_map": {f"t{i}": name for i, name in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(tree))


def test_shards_add_up(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model-2.safetensors").write_bytes(safetensors({"c": ("F32", 0, 40)}))
    index(folder, "model-1.safetensors", "model-2.safetensors", "model-2.safetensors")
    geometry = present(report(folder).geometry)
    assert geometry.weights_bytes == 640


def link_in_a_circle(folder: Path) -> None:
    (folder / "model-2.safetensors").symlink_to(folder / "model-2.safetensors")


def pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


def device(name: str) -> Callable[[Path], None]:
    """Return a function that makes a link to a device from which one could read without an end."""

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")

    return make


def as_folder(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def content(name: str, what: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(what)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: configure(folder, **changes)


def weights(what: bytes) -> Callable[[Path], object]:
    return content("model.safetensors", what)


BROKEN = [
    pytest.param(lambda f: (f / "config.json").unlink(), "has no config.json", id="no-config"),
    pytest.param(as_folder("config.json"), "has no config.json", id="config-is-a-folder"),
    pytest.param(pipe("config.json"), "has no config.json", id="config-is-a-pipe"),
    pytest.param(device("tokenizer.json"), "tokenizer.json is not a file", id="endless-tokenizer"),
    pytest.param(device("chat_template.jinja"), "is not a file", id="endless-template"),
    pytest.param(device("config.json"), "has no config.json", id="endless-config"),
    pytest.param(
        device("additional_chat_templates/a.jinja"), "a.jinja is not a file", id="endless-folder"
    ),
    pytest.param(content("config.json", b"{"), "content: Invalid JSON", id="config-no-json"),
    pytest.param(content("config.json", b"\xff{}"), "content: Invalid", id="config-no-text"),
    pytest.param(content("config.json", b"[" * 99_999), "Invalid JSON", id="config-deep"),
    pytest.param(content("config.json", b"{}"), "model_type: Field required", id="config-empty"),
    pytest.param(config(vocab_size="many"), "vocab_size: Input should be", id="config-word"),
    pytest.param(config(num_hidden_layers=-2), "num_hidden_layers: Input", id="config-negative"),
    pytest.param(config(num_attention_heads=0), "num_attention_heads: Input", id="config-zero"),
    pytest.param(config(vocab_size=10**30), "vocab_size: Input should be", id="config-huge"),
    pytest.param(lambda f: (f / "model.safetensors").unlink(), "no weights", id="no-weights"),
    pytest.param(as_folder("model.safetensors"), "is not a file", id="weights-are-a-folder"),
    pytest.param(pipe("model.safetensors"), "is not a file", id="weights-are-a-pipe"),
    pytest.param(link_in_a_circle, "model-2.safetensors is not a file", id="link-in-a-circle"),
    pytest.param(
        lambda f: (f / "model-2.safetensors").symlink_to("/nowhere"), "link to none", id="dangling"
    ),
    pytest.param(weights(b""), "is not a safetensors file, or was cut short", id="empty"),
    pytest.param(weights(b"1234567"), "is not a safetensors file", id="no-length"),
    pytest.param(weights(safetensors()[:40]), "or was cut short", id="cut-in-the-header"),
    pytest.param(
        weights(safetensors(missing=1)),
        "was cut short: .* bytes, its header says",
        id="a-byte-less",
    ),
    pytest.param(weights(safetensors() + b"x"), "its header says", id="a-byte-more"),
    pytest.param(weights(b"\xff" * 100), "is not a safetensors file", id="length-is-huge"),
    pytest.param(
        weights(struct.pack("<Q", 5) + safetensors()[8:]), "broken safetensors", id="length-lies"
    ),
    pytest.param(
        weights(safetensors({"a": ("F32", 400, 0), "b": ("F32", 0, 400)})),
        "broken safetensors header",
        id="offsets-go-down",
    ),
    pytest.param(
        weights(safetensors({"a": ("F32", -8, 0)})), "broken safetensors", id="offsets-below-zero"
    ),
    pytest.param(
        lambda f: index(f, "model.safetensors", "model-9.safetensors"),
        "lacks 1 of 2 weight files, first model-9.safetensors",
        id="a-shard-is-missing",
    ),
    pytest.param(content("model.safetensors.index.json", b"null"), "index.json: con", id="index"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_what_is_broken_is_named(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(ModelUnusableError, match=message):
        model_files.model_geometry(model_files.inspect_model(folder), casts_to_float32=False)
    model_report = report(folder)
    assert model_report.geometry is None
    assert model_report.reason in ("ModelUnusable", "ModelSizeUnknown")


@pytest.mark.parametrize("path", ["nowhere", "config.json", "x" * 300, "x/" * 500, "a\u0000b"])
def test_a_path_that_leads_nowhere(folder: Path, path: str) -> None:
    model_report = inspection.report_model(path, folder, casts_to_float32=False)
    assert (model_report.path, model_report.geometry, model_report.reason) == (
        path,
        None,
        "ModelNotFound",
    )


def test_a_folder_that_is_absent_is_told_with_a_similar_one(folder: Path) -> None:
    def message(path: str) -> str:
        return inspection.report_model(path, folder.parent, casts_to_float32=False).message

    (folder.parent / f"{folder.name}-notes").mkdir()  # no model
    wrong = f"{folder.name}x"
    assert message(wrong) == f"{folder.parent / wrong} does not exist; did you mean {folder.name}?"
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "config.json").touch()
    assert message(wrong).endswith(f"; did you mean {folder.name}? Models there: other")
    assert message("unlike").endswith(f"unlike does not exist; models there: {folder.name}, other")
    assert message("nothing/alike") == (
        f"{folder.parent}/nothing/alike does not exist, nor does {folder.parent}/nothing"
    )
    assert message(f"{folder.name}/config.json").endswith("is not a directory")


def test_a_file_name_that_is_no_text_can_be_reported(folder: Path) -> None:
    name = os.fsencode(folder) + b"/model-\xff.safetensors"
    try:
        descriptor = os.open(name, os.O_CREAT | os.O_WRONLY)
    except OSError:
        pytest.skip("this file system takes text only, as Apple's does")
    os.close(descriptor)
    assert "model-?.safetensors" in report(folder).message


def test_paths_are_looked_up_below_the_models_folder(folder: Path) -> None:
    assert inspection.resolve_path("a/b", Path("/m")) == Path("/m/a/b")
    assert inspection.resolve_path("/a/b", Path("/m")) == Path("/a/b")
    reports = inspection.report_models(
        [folder.name, "b", "b"], folder.parent, casts_to_float32=False
    )
    assert [(r.path, r.reason) for r in reports] == [("b", "ModelNotFound"), (folder.name, "")]


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    facts = model_files.inspect_model(folder)
    model_files.check_context(facts, 4096)
    with pytest.raises(ModelUnusableError, match=r"4097 is more than .* 4096"):
        model_files.check_context(facts, 4097)


@given(config_bytes=configs, weights_bytes=files, index_bytes=st.none() | configs)
def test_nothing_on_disk_is_worse_than_unusable(
    config_bytes: bytes, weights_bytes: bytes, index_bytes: bytes | None
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(config_bytes)
        (folder / "model.safetensors").write_bytes(weights_bytes)
        if index_bytes is not None:
            (folder / "model.safetensors.index.json").write_bytes(index_bytes)
        model_report = report(folder)
    assert model_report.geometry is not None or (model_report.reason and model_report.message)
    ModelReport.model_validate_json(model_report.model_dump_json())


def sparse(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def large(name: str, size: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        sparse(folder / name, size)

    return make


def many(name: str, count: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        for number in range(count):
            (folder / name.format(number)).touch()

    return make


def huge_header(folder: Path) -> None:
    """A header of the format's largest size, of which nothing is read."""
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 99_000_000))
        file.truncate(99_000_100)


def headed(name: str, raw: bytes) -> Callable[[Path], object]:
    return content(name, struct.pack("<Q", len(raw)) + raw)


def many_tensors(folder: Path) -> None:
    """More in two files than a model can have, although each has few enough."""
    entry = b'"%d":{"dtype":"F32","data_offsets":[0,0]}'
    raw = b"{" + b",".join(entry % number for number in range(101_000)) + b"}"
    for number in (1, 2):
        headed(f"model-{number}.safetensors", raw)(folder)


def header(begin: bytes, part: bytes, count: int, end: bytes) -> Callable[[Path], object]:
    """Write weights whose header has one tensor, with a further field of many parts."""
    tensor = b'{"a":{"dtype":"F32","data_offsets":[0,0]'
    return lambda folder: headed(
        "model.safetensors",
        tensor + begin + part * count + end * (count if end == b"]" else 1) + b"}}",
    )(folder)


def much_metadata(folder: Path) -> None:
    entries = b",".join(b'"%x":""' % number for number in range(1_400_000))
    headed("model.safetensors", b'{"__metadata__":{' + entries + b"}}")(folder)


def many_index_entries(folder: Path) -> None:
    entries = b",".join(b'"%x":""' % number for number in range(2_700_000))
    content("model.safetensors.index.json", b'{"weight_map":{' + entries + b"}}")(folder)


INDEX, TEMPLATES = "model.safetensors.index.json", "additional_chat_templates"
LIMITS = [
    # Its product is a number of a million digits.
    pytest.param(header(b',"shape":[', b"999999,", 150_000, b"1]"), "model.safetensors has a broken safetensors header", id="dimensions"),
    pytest.param(header(b',"x":[', b"[],", 5_499_999, b"[]]"), "model.safetensors has 5500002 values; at most 200016 are read", id="unused-values"),
    pytest.param(header(b',"x":', b"[", 8_000_000, b"]"), "model.safetensors has a broken safetensors header", id="deep-nesting"),
    pytest.param(much_metadata, "model.safetensors has 1399999 values; at most 200016 are read", marks=pytest.mark.ci),
    pytest.param(many_index_entries, f"{INDEX} has 2699999 values; at most 200016 are read", marks=pytest.mark.ci),
    pytest.param(many(f"{TEMPLATES}/{{}}.jinja", 33), f"{TEMPLATES} has more than 32 files", id="templates"),
    pytest.param(large(f"{TEMPLATES}/a.jinja", (1 << 20) + 1), "a.jinja has 1048577 bytes", id="second-template"),
    pytest.param(huge_header, "model.safetensors has a header of 99000000 bytes; at most 16777216 are read"),
    pytest.param(many_tensors, "model-2.safetensors has too many tensors: a model can have at most 200000", marks=pytest.mark.ci),
    pytest.param(many("model-{}.safetensors", 4_097), "has more than 4096 weight files", id="files"),
    pytest.param(large("config.json", (1 << 20) + 1), "config.json has 1048577 bytes; at most 1048576 are read", id="config"),
    pytest.param(large(INDEX, 33 << 20), f"{INDEX} has 34603008 bytes", id="index"),
    pytest.param(large("tokenizer.json", (256 << 20) + 1), "tokenizer.json has 268435457 bytes; at most 268435456 are read", id="tokenizer"),
    pytest.param(large("chat_template.jinja", (1 << 20) + 1), "chat_template.jinja has 1048577 bytes", id="template"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "message"), LIMITS)
def test_a_folder_is_read_within_limits(
    folder: Path, fault: Callable[[Path], object], message: str
) -> None:
    """An agent looks at every folder that a deployment names; none may take its memory, or that of the child that reads."""
    fault(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelUnusableError, match=re.escape(message)):
        model_files.inspect_model(folder)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 400 << 10


def test_a_folder_of_links_as_in_the_cache_of_hugging_face(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for path in [one for one in folder.iterdir() if one.is_file()]:
        path.rename(blobs / path.name)
        path.symlink_to(Path("..") / "blobs" / path.name)
    assert report(folder).geometry is not None


@pytest.mark.ci
def test_large_but_real_files_are_accepted(folder: Path) -> None:
    sparse(folder / "tokenizer.json", 200 << 20)
    tensors = {f"layer.{n}.weight": ("F32", 8 * n, 8 * n + 8) for n in range(100_000)}
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    assert report(folder).geometry is not None


def test_the_sizes_of_a_vision_tower(tmp_path: Path) -> None:
    def tower(model_type: str, **vision: Any) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        config = {**CONFIG, "model_type": model_type, "vision_config": vision}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(safetensors())
        facts = model_files.inspect_model(folder)
        return model_files.model_geometry(facts, casts_to_float32=False).vision

    qwen = tower("qwen2_vl", embed_dim=1280, hidden_size=3584, patch_size=14, num_heads=16)
    assert (qwen.width, qwen.ffn, qwen.patch, qwen.side) == (1280, 5120, 14, 0)
    deep = tower(
        "qwen3_vl",
        hidden_size=1152,
        intermediate_size=4304,
        patch_size=16,
        deepstack_visual_indexes=[8, 16, 24],
    )
    assert (deep.width, deep.ffn, deep.patch, deep.added_rows) == (1152, 4304, 16, 3)
    square = tower(
        "gemma3", hidden_size=1152, patch_size=14, image_size=896, num_attention_heads="x"
    )
    assert (square.side, square.heads) == (896, 16)
