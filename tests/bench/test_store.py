"""The peers' environment has what the worker of `bench.store` imports."""

import importlib.metadata
import re
import subprocess
import sys

from bench.store.peers import OURS

_IMPORTED = """
import sys
before = set(sys.modules)
import bench.store.worker
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_dependencies(names: tuple[str, ...]) -> set[str]:
    """Return what pip installs with these distributions, extras left out."""
    found: set[str] = set()
    rest = list(names)
    while rest:
        name = normal(rest.pop())
        if name not in found:
            found.add(name)
            needs = importlib.metadata.requires(name) or []
            rest += [re.split(r"[^\w.-]", one)[0] for one in needs if "extra ==" not in one]
    return found


def test_the_worker_finds_its_imports_beside_the_peers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True
    )
    owners = importlib.metadata.packages_distributions()
    needed = {normal(owner) for name in done.stdout.split() for owner in owners.get(name, [])}
    assert "pydantic" in needed
    assert needed - {"mlx-fleet"} <= with_dependencies(OURS)
