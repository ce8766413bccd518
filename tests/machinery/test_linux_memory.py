"""Memory of a Linux machine and of its cgroups, read from small file trees."""

from pathlib import Path

import pytest

from machinery import linux_memory
from tests.support.linux_files import CGROUP_V2, write_tree

GIB = 2**30


def test_unreadable_memory_is_unknown(tmp_path: Path) -> None:
    assert linux_memory.available_memory_bytes(tmp_path) is None
    assert linux_memory.memory_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "available_gib"),
    [
        pytest.param({}, 8, id="machine"),
        pytest.param({"memory.max": 4 * GIB, "memory.current": GIB}, 3, id="group-has-less"),
        pytest.param({"memory.max": 15 * GIB, "memory.current": GIB}, 8, id="machine-has-less"),
        pytest.param({"memory.max": 4 * GIB, "memory.current": 5 * GIB}, 0, id="over-its-limit"),
        pytest.param({"memory.max": 4 * GIB}, 8, id="use-not-known"),
        pytest.param(
            {
                "memory.max": 4 * GIB,
                "memory.current": 3 * GIB,
                "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
            },
            3,
            id="cache-counts-as-free",
        ),
    ],
)
def test_available(tmp_path: Path, files: dict[str, str | int], available_gib: int) -> None:
    group = {f"sys__fs__cgroup__machine__agent__{name}": str(text) for name, text in files.items()}
    root = write_tree(tmp_path, proc__self__cgroup=CGROUP_V2, **group)
    assert linux_memory.available_memory_bytes(root) == available_gib * GIB
