"""transformers finds the same names with what was kept as without, and nothing kept can keep it from starting."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

LOOK = """
import sys
from pathlib import Path
from engine.model import imports
if len(sys.argv) > 1:
    imports.quicken(Path(sys.argv[1]))
import transformers
from transformers.utils.import_utils import define_import_structure
found = define_import_structure(Path(transformers.__file__).parent / "models")
names = sorted(
    (sorted(needs), module, sorted(names))
    for needs, modules in found.items() for module, names in modules.items()
)
assert transformers.LlamaConfig and transformers.AutoTokenizer
print(names)
"""


def look(*arguments: str) -> str:
    command = [sys.executable, "-c", LOOK, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_what_is_kept_is_what_was_found(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    plain = look()
    assert "llama.configuration_llama" in plain
    assert look(str(cache)) == plain
    (kept,) = cache.iterdir()
    written = kept.stat().st_mtime_ns
    assert look(str(cache)) == plain
    assert kept.stat().st_mtime_ns == written
    whole = kept.read_bytes()
    kept.write_bytes(whole[:100])
    assert look(str(cache)) == plain
    assert kept.read_bytes() == whole


def test_a_folder_open_to_others_is_not_believed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert "llama.configuration_llama" in look(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
