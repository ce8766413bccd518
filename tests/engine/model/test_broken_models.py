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
from engine.ports import ServedModel
from engine.worker import Worker
from machinery.clock import SystemClock
from models.model_files import ModelUnusableError
from schemas.wire.engine_config import EngineConfig
from tests.support.engine_embedders import make_embedder
from tests.support.engine_process import START_S, Start
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

Fault = Callable[[Path], str]
"""Breaks a folder; returns a part of the expected error."""


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "has no config.json"


def half_a_config(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "qwen3", ')
    return "config.json: content: Invalid JSON"


def config_of_another_kind(folder: Path) -> str:
    (folder / "config.json").write_text("[]")
    return "config.json"


def config_is_a_folder(folder: Path) -> str:
    """Make the config unreadable, for root, too, who can read a file without permission."""
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    return "has no config.json"


def unknown_type(folder: Path) -> str:
    change(folder / "config.json", model_type="notamodel")
    return "Model type notamodel not supported"


def type_that_is_a_path(folder: Path) -> str:
    change(folder / "config.json", model_type="..server")
    return "Model type ..server not supported"


def own_code(folder: Path) -> str:
    (folder / "model.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    change(folder / "config.json", model_file="model.py")
    return "importing and running a custom module ('model.py')"


def numbers_that_are_none(folder: Path) -> str:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"hidden_size": 64', '"hidden_size": NaN'))
    return "config.json: hidden_size"


def negative_numbers(folder: Path) -> str:
    change(folder / "config.json", num_attention_heads=-4)
    return "config.json: num_attention_heads"


def garbage_for_mlx_lm(folder: Path) -> str:
    change(folder / "config.json", rms_norm_eps="small")
    return "config.json and the weights make no model: TypeError"


def missing_numbers(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    del config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    return "rms_norm_eps"


def short_context(folder: Path) -> str:
    change(folder / "config.json", max_position_embeddings=1024)
    return "max_position_embeddings, 1024"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "first model.safetensors"


def weights_of_which_one_is_absent(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    names = json.loads(path.read_text())["weight_map"]
    change(path, weight_map=names | {"lm_head.weight": "model-00002.safetensors"})
    return "lacks 1 of 2 weight files, first model-00002.safetensors"


def cut_short(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "model.safetensors was cut short"


def a_pointer_instead(folder: Path) -> str:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    return "model.safetensors is not a safetensors file"


def a_link_to_nothing(folder: Path) -> str:
    """Make a link without target, as a pruned Hugging Face cache has it."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blobs" / "gone")
    return "model.safetensors is not a file"


def a_pipe(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    return "model.safetensors is not a file"


def broken_header(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 20) + b'{"a": {"dtype": 5}}\n')
    return "model.safetensors has a broken safetensors header"


def other_shape(folder: Path) -> str:
    change(folder / "config.json", hidden_size=128)
    return "shape"


def missing_tensor(folder: Path) -> str:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    return "model.layers.1.mlp.up_proj.weight"


def foreign_tensor(folder: Path) -> str:
    rewrite(folder, lambda tensors: tensors.update(extra=tensors["lm_head.weight"]))
    return "extra"


def rewrite(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    mx = module("mlx.core")
    path = folder / "model.safetensors"
    tensors = dict(mx.load(str(path)))
    edit(tensors)
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "new.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "new.safetensors").rename(path)
    (folder / "model.safetensors.index.json").unlink()


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "tokenizer"


def no_tokenizer_at_all(folder: Path) -> str:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return "there is no tokenizer"


def broken_template(folder: Path) -> str:
    (folder / "chat_template.jinja").write_text("{% for x in %}")
    return "the chat template cannot be used: it cannot be parsed"


def template_of_a_huge_range(folder: Path) -> str:
    (folder / "chat_template.jinja").write_text("{% for i in range(10**9) %}x{% endfor %}")
    return "the chat template cannot be used: it loops too often"


def template_that_loops(folder: Path) -> str:
    loop = "{% for x in range(99999) %}"
    (folder / "chat_template.jinja").write_text(loop * 3 + "{% endfor %}" * 3)
    return "the chat template cannot be used: it takes more than 2 s"


def template_that_doubles_a_string(folder: Path) -> str:
    text = "{% set n = namespace(s='x' * 1000) %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(text)
    # 1024 MiB of memory, or 2 s where the machine is too busy to fill them.
    return "the chat template cannot be used: it takes more than "


def template_that_writes_without_end(folder: Path) -> str:
    text = "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(text)
    return "the chat template cannot be used: it writes more than 1 MiB"


def template_that_calls_itself(folder: Path) -> str:
    text = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    (folder / "chat_template.jinja").write_text(text)
    return "the chat template cannot be used: it calls itself"


def broken_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text('{"model": 1}')
    return "tokenizer"


def tokenizer_with(folder: Path, **changes: object) -> str:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return "tokenizer: "


def tokenizer_that_panics(folder: Path) -> str:
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    return tokenizer_with(folder, normalizer=charsmap) + "PanicException"


def tokenizer_that_panics_later(folder: Path) -> str:
    single = [{"SpecialToken": {"id": "none", "type_id": 0}}]
    empty = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    return tokenizer_with(folder, post_processor=empty)


def tokenizer_without_words(folder: Path) -> str:
    model = {"type": "WordLevel", "unk_token": "none", "vocab": {}}
    return tokenizer_with(folder, model=model, pre_tokenizer=None)


def tokenizer_nested_deeply(folder: Path) -> str:
    (folder / "tokenizer.json").write_bytes(b"[" * 20_000_000)
    return "tokenizer: RecursionError"


def tokenizer_of_another_file(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    return "tokenizer: "


def a_shape_larger_than_its_bytes(folder: Path) -> str:
    """Check that a file of 600 kB cannot become a gigabyte of memory that no proof has counted."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.embed_tokens.weight"]["shape"][0] = 1 << 22
    lead = json.dumps(header).encode()
    path.write_bytes(len(lead).to_bytes(8, "little") + lead + raw[8 + length :])
    change(folder / "config.json", vocab_size=1 << 22)
    return "invalid data offsets"


def half_a_tokenizer(folder: Path) -> str:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:5000])
    return "tokenizer"


def broken_pooling(folder: Path) -> str:
    made = make_embedder(folder, folder / "other")
    for name in ("modules.json", "1_Pooling"):
        shutil.move(made / name, folder / name)
    (folder / "1_Pooling" / "config.json").write_text("{")
    return "1_Pooling/config.json"


def nothing_at_all(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return "has no config.json"


def not_there(folder: Path) -> str:
    shutil.rmtree(folder)
    return "does not exist"


def a_name_too_long(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.symlink_to("x" * 255 + "/" + "y" * 300)
    return str(folder)


FAULTS: list[Fault] = [
    no_config, half_a_config, config_of_another_kind, config_is_a_folder, unknown_type,
    type_that_is_a_path, own_code, numbers_that_are_none, negative_numbers, garbage_for_mlx_lm,
    missing_numbers, short_context, no_weights, weights_of_which_one_is_absent, cut_short,
    a_pointer_instead, a_link_to_nothing, a_pipe, broken_header, other_shape, missing_tensor,
    foreign_tensor, no_tokenizer, no_tokenizer_at_all, broken_template, broken_tokenizer, half_a_tokenizer,
    tokenizer_that_panics, tokenizer_that_panics_later, tokenizer_without_words, tokenizer_nested_deeply,
    tokenizer_of_another_file, a_shape_larger_than_its_bytes,
    template_of_a_huge_range, template_that_loops, template_that_doubles_a_string,
    template_that_writes_without_end, template_that_calls_itself,
    broken_pooling, nothing_at_all, not_there, a_name_too_long,
]  # fmt: skip


class Ear:
    """Records how a worker ends, and stops a worker that loads a folder which it should refuse."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.error: Exception | None = None

    def on_met(self, lines: Mapping[int, socket.socket]) -> None:
        raise AssertionError(lines)

    def on_loading(self) -> None:
        raise AssertionError

    def on_ready(self, _: ServedModel) -> None:
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
    tiny: Path, tmp_path: Path, blas_cache: Path, fault: Fault
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "broken")
    wanted = fault(folder)
    error = end_of(folder, blas_cache)
    assert isinstance(error, ModelUnusableError), error
    assert wanted in str(error)
    assert str(folder) in str(error) or fault is short_context
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


@pytest.mark.parametrize("fault", [cut_short, broken_tokenizer, template_of_a_huge_range])
def test_the_process_ends_with_one_line(
    start: Start, tiny: Path, tmp_path: Path, fault: Fault
) -> None:
    """Check an error that is found before mlx is imported, and one that mlx-lm finds."""
    folder = shutil.copytree(tiny, tmp_path / "broken")
    wanted = fault(folder)
    engine = start(folder)
    assert engine.wait(START_S) == 2, engine.stderr.read_text()
    assert engine.last_words().startswith("engine: ")
    assert wanted in engine.last_words()
    assert "Traceback" not in engine.stderr.read_text()
