"""A model's folder, broken in more than ten ways: each is refused with one sentence that says where to look.

The worker itself is asked, in this process: what it raises is what a process ends with, which two real ones show.
"""

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.gauges import Gauges
from engine.jobs import WorkerEvent
from engine.ports import ServedModel, ServedSpeech
from engine.worker import Worker
from machinery.clock import SystemClock
from models.model_files import ModelUnusableError
from schemas.wire.engine_config import EngineConfig
from tests.support.engine_embedders import make_embedder
from tests.support.engine_process import START_S, Start
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

Fault = Callable[[Path], object]
"""Breaks a folder."""


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def config(**fields: Any) -> Fault:
    return lambda folder: change(folder / "config.json", **fields)


def text(name: str, content: str) -> Fault:
    return lambda folder: (folder / name).write_text(content)


def template(content: str) -> Fault:
    return text("chat_template.jinja", content)


def tokenizer(**fields: Any) -> Fault:
    return lambda folder: change(folder / "tokenizer.json", **fields)


def without(name: str) -> Fault:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, make: Callable[[Path], object]) -> Fault:
    """Return a fault that puts something else in the place of a file."""

    def fault(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return fault


def cut(name: str, keep: int) -> Fault:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def own_code(folder: Path) -> None:
    (folder / "model.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    change(folder / "config.json", model_file="model.py")


def numbers_that_are_none(folder: Path) -> None:
    content = (folder / "config.json").read_text()
    (folder / "config.json").write_text(content.replace('"hidden_size": 64', '"hidden_size": NaN'))


def missing_number(folder: Path) -> None:
    tree = json.loads((folder / "config.json").read_text())
    del tree["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(tree))


def weights_of_which_one_is_absent(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    names = json.loads(path.read_text())["weight_map"]
    change(path, weight_map=names | {"lm_head.weight": "model-00002.safetensors"})


def broken_header(folder: Path) -> None:
    raw = struct.pack("<Q", 20) + b'{"a": {"dtype": 5}}\n'
    (folder / "model.safetensors").write_bytes(raw)


def rewrite(edit: Callable[[dict[str, Any]], object]) -> Fault:
    """Return a fault in the tensors of the only weight file."""

    def fault(folder: Path) -> None:
        mx = module("mlx.core")
        path = folder / "model.safetensors"
        tensors = dict(mx.load(str(path)))
        edit(tensors)
        mx.eval(tensors)
        mx.save_safetensors(str(folder / "new.safetensors"), tensors, metadata={"format": "mlx"})
        (folder / "new.safetensors").rename(path)
        (folder / "model.safetensors.index.json").unlink()

    return fault


def no_tokenizer_at_all(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def a_shape_larger_than_its_bytes(folder: Path) -> None:
    """Write a file of 600 kB that would become a gigabyte of memory that no proof has counted."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.embed_tokens.weight"]["shape"][0] = 1 << 22
    lead = json.dumps(header).encode()
    path.write_bytes(len(lead).to_bytes(8, "little") + lead + raw[8 + length :])
    change(folder / "config.json", vocab_size=1 << 22)


def broken_pooling(folder: Path) -> None:
    made = make_embedder(folder, folder / "other")
    for name in ("modules.json", "1_Pooling"):
        shutil.move(made / name, folder / name)
    (folder / "1_Pooling" / "config.json").write_text("{")


def nothing_at_all(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def a_name_too_long(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("x" * 255 + "/" + "y" * 300)


PANIC = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
LATE_PANIC = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
NO_WORDS = {"type": "WordLevel", "unk_token": "none", "vocab": {}}
MODEL, UNUSABLE = "model.safetensors", "the chat template cannot be used: "
LOOP, END = "{% for x in range(99999) %}", "{% endfor %}"
DOUBLED = (
    "{% set n = namespace(s='x' * 1000) %}{% for i in range(40) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}"
)
FAULTS: dict[str, tuple[Fault, str]] = {
    "no config": (without("config.json"), "has no config.json"),
    "half a config": (text("config.json", '{"model_type": '), "config.json: content: Invalid JSON"),
    "config of another kind": (text("config.json", "[]"), "config.json"),
    # Root, too, cannot read it.
    "config is a folder": (replaced("config.json", Path.mkdir), "has no config.json"),
    "unknown type": (config(model_type="notamodel"), "Model type notamodel not supported"),
    "type is a path": (config(model_type="..server"), "Model type ..server not supported"),
    "own code": (own_code, "importing and running a custom module ('model.py')"),
    "numbers that are none": (numbers_that_are_none, "config.json: hidden_size"),
    "negative numbers": (config(num_attention_heads=-4), "config.json: num_attention_heads"),
    "garbage for mlx-lm": (
        config(rms_norm_eps="small"),
        "config.json and the weights make no model: TypeError",
    ),
    "missing number": (missing_number, "rms_norm_eps"),
    "short context": (config(max_position_embeddings=1024), "max_position_embeddings, 1024"),
    "no weights": (without(MODEL), "first model.safetensors"),
    "one file is absent": (
        weights_of_which_one_is_absent,
        "lacks 1 of 2 weight files, first model-00002.safetensors",
    ),
    "cut short": (cut(MODEL, -100), "model.safetensors was cut short"),
    "a pointer": (text(MODEL, "version https://git-lfs\n"), f"{MODEL} is not a safetensors file"),
    # As a pruned Hugging Face cache has it.
    "a link to nothing": (
        replaced(MODEL, lambda path: path.symlink_to("gone")),
        "model.safetensors is not a file",
    ),
    "a pipe": (replaced(MODEL, os.mkfifo), "model.safetensors is not a file"),
    "broken header": (broken_header, "model.safetensors has a broken safetensors header"),
    "other shape": (config(hidden_size=128), "shape"),
    "missing tensor": (
        rewrite(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
        "model.layers.1.mlp.up_proj.weight",
    ),
    "foreign tensor": (
        rewrite(lambda tensors: tensors.update(extra=tensors["lm_head.weight"])),
        "extra",
    ),
    "a shape larger than its bytes": (a_shape_larger_than_its_bytes, "invalid data offsets"),
    "no tokenizer": (without("tokenizer.json"), "tokenizer"),
    "no tokenizer at all": (no_tokenizer_at_all, "there is no tokenizer"),
    "broken tokenizer": (text("tokenizer.json", '{"model": 1}'), "tokenizer"),
    "half a tokenizer": (cut("tokenizer.json", 5000), "tokenizer"),
    "tokenizer panics": (tokenizer(normalizer=PANIC), "tokenizer: PanicException"),
    "tokenizer panics later": (tokenizer(post_processor=LATE_PANIC), "tokenizer: "),
    "tokenizer has no words": (tokenizer(model=NO_WORDS, pre_tokenizer=None), "tokenizer: "),
    "tokenizer nested deeply": (
        text("tokenizer.json", "[" * 20_000_000),
        "tokenizer: RecursionError",
    ),
    "tokenizer of another file": (
        replaced("tokenizer.json", lambda path: path.symlink_to("/etc/passwd")),
        "tokenizer: ",
    ),
    "broken template": (template("{% for x in %}"), UNUSABLE + "it cannot be parsed"),
    "template of a huge range": (
        template("{% for i in range(10**9) %}x{% endfor %}"),
        UNUSABLE + "it loops too often",
    ),
    "template loops": (template(LOOP * 3 + END * 3), UNUSABLE + "it takes more than 2 s"),
    # 1024 MiB of memory, or 2 s where the machine is too busy to fill them.
    "template doubles a string": (template(DOUBLED), UNUSABLE + "it takes more than "),
    "template writes without end": (
        template(LOOP + "{{ 'x' * 99 }}" + END),
        UNUSABLE + "it writes more than 1 MiB",
    ),
    "template calls itself": (
        template("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
        UNUSABLE + "it calls itself",
    ),
    "broken pooling": (broken_pooling, "1_Pooling/config.json"),
    "nothing at all": (nothing_at_all, "has no config.json"),
    "not there": (shutil.rmtree, "does not exist"),
    "a name too long": (a_name_too_long, "broken"),
}


class Ear:
    """Records how a worker ends, and stops a worker that loads a folder which it should refuse."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.error: Exception | None = None

    def on_met(self, lines: Mapping[int, socket.socket]) -> None:
        raise AssertionError(lines)

    def on_loading(self) -> None:
        raise AssertionError

    def on_ready(self, _: ServedModel | ServedSpeech) -> None:
        assert self.worker is not None
        self.worker.stop()

    def on_events(self, events: list[WorkerEvent]) -> None:
        raise AssertionError(events)

    def on_end(self, error: Exception | None) -> None:
        self.error = error


def end_of(folder: Path, blas_cache: Path) -> Exception | None:
    """Return the error with which a worker's thread ends on this folder."""
    module("engine.model.loader")  # restores what mlx_lm does to the process
    config = EngineConfig(model_dir=folder, blas_cache=blas_cache)
    ear = Ear()
    ear.worker = Worker(config=config, gauges=Gauges(), clock=SystemClock())
    ear.worker._run(ear)
    return ear.error


def test_a_complete_folder_is_accepted(tiny: Path, blas_cache: Path) -> None:
    assert end_of(tiny, blas_cache) is None


@pytest.mark.ci
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_is_refused(
    tiny: Path, tmp_path: Path, blas_cache: Path, fault: str
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "broken")
    spoil, wanted = FAULTS[fault]
    spoil(folder)
    error = end_of(folder, blas_cache)
    assert isinstance(error, ModelUnusableError), error
    assert wanted in str(error)
    assert str(folder) in str(error) or fault == "short context"
    assert len(str(error)) < 1000
    assert not (folder / "ran").exists()


@pytest.mark.ci
def test_a_tokenizers_own_code_is_not_run(tiny: Path, tmp_path: Path, blas_cache: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "own")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    change(folder / "tokenizer_config.json", **own)
    assert end_of(folder, blas_cache) is None  # by the file alone
    assert not (folder / "ran").exists()


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["cut short", "broken tokenizer", "template of a huge range"])
def test_the_process_ends_with_one_line(
    start: Start, tiny: Path, tmp_path: Path, fault: str
) -> None:
    """Check an error that is found before mlx is imported, and one that mlx-lm finds."""
    folder = shutil.copytree(tiny, tmp_path / "broken")
    spoil, wanted = FAULTS[fault]
    spoil(folder)
    engine = start(folder)
    assert engine.wait(START_S) == 2, engine.stderr.read_text()
    assert engine.last_words().startswith("engine: ")
    assert wanted in engine.last_words()
    assert "Traceback" not in engine.stderr.read_text()
