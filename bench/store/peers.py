"""An environment of the peers' own, in the user's cache: pip puts them there, never beside ours."""

import subprocess
import sys
import time
import venv
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import platformdirs

from bench.store.ways import Way

# What peers are built on has our versions, or the comparison would be one of those.
_SHARED = (
    "aiohttp",
    "grpcio",
    "msgspec",
    "orjson",
    "protobuf",
    "psutil",
    "pydantic",
    "typing-extensions",
    "uvloop",
)
# What `bench.store.worker` imports in the peers' environment; tests/bench/test_store.py holds it complete.
OURS = ("cronsim", "msgspec", "orjson", "psutil", "pydantic", "typing-extensions", "uvloop")
# For all installing together: without a network pip tries for long, once for each peer.
_BUDGET_S = 100.0


def environment() -> Path:
    """Return the folder; another Python gets another one."""
    cache = platformdirs.user_cache_path("mlx-fleet", appauthor=False)
    return cache / f"bench-store-py{sys.version_info.major}{sys.version_info.minor}"


def interpreter() -> Path:
    return environment() / "bin" / "python"


def prepare(ways: Sequence[Way]) -> dict[str, str]:
    """Install what is not installed yet; return who cannot take part, and why."""
    constraints, done = environment() / "constraints.txt", environment() / "installed.txt"
    pins = "".join(f"{name}=={version(name)}\n" for name in sorted({*_SHARED, *OURS}))
    if not constraints.exists() or constraints.read_text() != pins:
        venv.create(environment(), clear=True)
        constraints.write_text(pins)
    installed = set(done.read_text().splitlines()) if done.exists() else set()
    wanted = {way.name: {*OURS, *way.requires} - installed for way in ways}
    # All in one go, for pip is slow to start; one by one only to know who is to blame.
    everything = set[str]().union(*wanted.values())
    missing: dict[str, str] = {}
    until_s = time.monotonic() + _BUDGET_S
    if everything and _install(everything, until_s):
        for name, requirements in wanted.items():
            if why := _install(requirements, until_s):
                missing[name] = why
    kept = (set(way.requires) | {*OURS} for way in ways if way.name not in missing)
    done.write_text("".join(f"{name}\n" for name in sorted(installed.union(*kept))))
    return missing


def _install(requirements: Iterable[str], until_s: float) -> str:
    """Install with pip's own configuration; return its last words if it failed."""
    limit_s = until_s - time.monotonic()
    if limit_s <= 0:
        return f"installing took more than {_BUDGET_S:.0f} s"
    # Our own pip, with the other environment as its target: a second pip takes seconds to make.
    command = (
        *(sys.executable, "-m", "pip", "--python", str(interpreter()), "install"),
        *("--quiet", "--disable-pip-version-check", "--no-compile", "--retries", "1"),
        *("--constraint", str(environment() / "constraints.txt"), *sorted(requirements)),
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"installing took more than {_BUDGET_S:.0f} s"
    if done.returncode == 0:
        return ""
    words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return words[-1] if words else f"pip exited with {done.returncode}"
