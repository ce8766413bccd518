"""The import cache: transformers finds the same names with it, and no broken cache prevents a start."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

LIST_NAMES = """
import sys
from pathlib import Path
from engine.model import import_cache
if len(sys.argv) > 1:
    import_cache.install(Path(sys.argv[1]))
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


def list_names(*arguments: str) -> str:
    command = [sys.executable, "-c", LIST_NAMES, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.ci
def test_the_cached_names_are_those_of_transformers(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    plain = list_names()
    assert "llama.configuration_llama" in plain
    assert list_names(str(cache)) == plain
    (cached,) = cache.iterdir()
    written = cached.stat().st_mtime_ns
    assert list_names(str(cache)) == plain
    assert cached.stat().st_mtime_ns == written
    whole = cached.read_bytes()
    cached.write_bytes(whole[:100])
    assert list_names(str(cache)) == plain
    assert cached.read_bytes() == whole


@pytest.mark.ci
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert "llama.configuration_llama" in list_names(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
