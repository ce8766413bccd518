"""Untrusted models are read in a child process: its limits, what it answers, and who waits for it."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from machinery import limited_child
from machinery.limited_child import ChildEnd, ChildLimits
from models import adapter_files, inspection_process, model_files
from models.model_files import ModelUnusableError
from tests.support.model_folders import CONFIG

_MIB = 1 << 20


def header(count: int) -> bytes:
    """Return the header of a safetensors file with so many tensors of 4 bytes."""
    tensors: dict[str, Any] = {
        f"model.layers.{n}.weight": {
            "dtype": "F32",
            "shape": [1],
            "data_offsets": [4 * n, 4 * n + 4],
        }
        for n in range(count)
    }
    return json.dumps(tensors, separators=(",", ":")).encode()


def write_weights(path: Path, raw: bytes, size: int) -> None:
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model of 30,000 tensors: 2.4 MB of header."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_weights(tmp_path / "model.safetensors", header(30_000), 120_000)
    return tmp_path


@pytest.mark.ci
def test_a_large_header_is_read_outside_of_this_process(folder: Path) -> None:
    expected = model_files.inspect_model(folder)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from models import inspection_process\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "facts = inspection_process.inspect_model(Path(sys.argv[1]))\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(facts.weights.parameters, grown)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    parameters, grown_kib = map(int, done.stdout.split())
    assert parameters == expected.weights.parameters == 30_000
    assert grown_kib < 8 << 10
    assert inspection_process.inspect_model(folder) == expected


@pytest.mark.ci
def test_a_child_refuses_in_the_words_of_the_inspection(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 3_000_000)
    with pytest.raises(ModelUnusableError, match="was cut short") as refused:
        inspection_process.inspect_model(folder)
    assert str(folder / "model.safetensors") in str(refused.value)


@pytest.mark.ci
def test_a_large_adapter_is_read_in_a_child(tmp_path: Path) -> None:
    config = {
        "num_layers": 1,
        "lora_parameters": {"rank": 1, "scale": 1.0, "dropout": 0.0, "keys": None},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"layers.{n // 2}.lora_{'ab'[n % 2]}": {
            "dtype": "F32",
            "shape": [1, 1],
            "data_offsets": [4 * n, 4 * n + 4],
        }
        for n in range(20_000)
    }
    write_weights(tmp_path / "adapters.safetensors", json.dumps(tensors).encode(), 80_000)
    facts = inspection_process.inspect_adapter(tmp_path)
    assert facts == adapter_files.inspect_adapter(tmp_path)
    assert len(facts.layers) == 10_000


@pytest.mark.parametrize(("limits", "words"), [
    (ChildLimits(memory_bytes=120 * _MIB, cpu_s=30, wall_s=60.0), "model.safetensors takes more than 120 MiB of memory to read"),
    (ChildLimits(memory_bytes=768 * _MIB, cpu_s=30, wall_s=0.02), "more than 30 s of a core"),
], ids=["memory", "time"])  # fmt: skip
def test_a_folder_beyond_the_limits_is_refused_by_name(
    folder: Path, limits: ChildLimits, words: str
) -> None:
    """The limits are those of the parent: one that the child does not keep by itself, as on macOS, ends it, too."""
    write_weights(folder / "model.safetensors", header(150_000), 600_000)
    with pytest.raises(ModelUnusableError) as refused:
        inspection_process.inspect_model(folder, limits)
    assert str(folder) in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.ci
def test_headers_of_a_hub_are_summed_in_a_child_as_here() -> None:
    config = json.dumps(CONFIG)
    few, many = header(100), header(40_000)
    small = inspection_process.sum_headers(
        "a/b", config, {"model.safetensors": (408 + len(few), few)}
    )
    assert small.weights.parameters == 100
    assert small.packed
    large = inspection_process.sum_headers(
        "a/b",
        config,
        {
            "model-1.safetensors": (160_008 + len(many), many),
            "model-2.safetensors": (408 + len(few), few),
        },
    )
    assert large.weights.total_bytes == 160_000
    with pytest.raises(ModelUnusableError, match=r"a/b/model-2\.safetensors was cut short"):
        inspection_process.sum_headers(
            "a/b",
            config,
            {"model-1.safetensors": (160_008 + len(many), many), "model-2.safetensors": (400, few)},
        )


@pytest.mark.ci
def test_all_files_of_a_model_share_the_limit_of_tensors() -> None:
    many = header(80_000)
    files = {f"model-{n}.safetensors": (320_008 + len(many), many) for n in range(3)}
    with pytest.raises(ModelUnusableError, match=r"model-2\.safetensors has too many tensors"):
        inspection_process.sum_headers("a/b", json.dumps(CONFIG), files)


CHILD = """
import sys
from machinery import limited_child
from machinery.limited_child import ChildLimits

def answer(question, output):
    output.write(b"begun")
    output.flush()
    exec(question)

limited_child.serve(answer, ChildLimits(memory_bytes=200 << 20, cpu_s=1, wall_s=30.0))
"""


@pytest.mark.parametrize(("code", "end"), [
    ("output.write(b' and done')", ChildEnd.DONE),
    ("x = [0] * (1 << 30)", ChildEnd.MEMORY),
    ("while True: pass", ChildEnd.TIME),
    ("raise KeyError(1)", ChildEnd.FAILED),
    ("import os; os.kill(os.getpid(), 9)", ChildEnd.FAILED),
])  # fmt: skip
def test_the_ends_of_a_child(
    code: str, end: ChildEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "confined_program.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FLEET_API_KEY", "s3cret")
    limits = ChildLimits(memory_bytes=200 << 20, cpu_s=1, wall_s=30.0)
    outcome = limited_child.run("confined_program", code.encode(), limits)
    assert outcome.end is end
    assert outcome.output.startswith(b"begun")
    assert b"s3cret" not in outcome.output
