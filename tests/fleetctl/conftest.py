"""Stores for the tests of fleetctl: in memory (`fleet`, `shared_fleet`), and real etcds (`store`, `shared`)."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TypeAlias

import pytest

from store.etcd.connect import connect
from store.port import Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.golden import FOLDER, Programs, golden_fleet, golden_text, matches_golden

Golden: TypeAlias = Callable[..., Awaitable[None]]
"""Runs a golden file: its name, the fleet or None for that of `world.yaml`, and what names in it stand for."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Return an etcd and nothing else."""
    fleet = Fleet(tmp_path / "fleet", tmp_path / "models")
    await fleet.etcd.start()
    yield fleet
    await fleet.stop()


@pytest.fixture(autouse=True)
def no_fleet_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the commands away from whatever fleet this machine runs."""
    for name in list(os.environ):
        if name.startswith(("FLEET_", "FLEETCTL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FLEET_DATA_DIR", str(tmp_path / "nobody"))
    monkeypatch.setenv("FLEETCTL_CONFIG", str(tmp_path / "nobody.toml"))


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Return an etcd and nothing else, for all tests of a file: each uses names of its own."""
    root = tmp_path_factory.mktemp("shared")
    fleet = Fleet(root / "fleet", root / "models")
    await fleet.etcd.start()
    yield fleet
    await fleet.stop()


@pytest.fixture(scope="module")
async def transport(shared: Fleet) -> AsyncIterator[Transport]:
    """Return a way into the store, for what agents and the reconciler write."""
    made = connect(shared.etcd.address)
    yield made
    await made.close()


@pytest.fixture
def fleet() -> MemoryFleet:
    """Return an empty store in memory; its commands run in this process."""
    return MemoryFleet()


@pytest.fixture(scope="module")
def shared_fleet() -> MemoryFleet:
    """Return a store in memory for all tests of a file: each test uses names of its own."""
    return MemoryFleet()


@pytest.fixture(scope="module")
def shared_transport(shared_fleet: MemoryFleet) -> Transport:
    """Return the shared store itself, to write what agents and the reconciler write."""
    return shared_fleet.store


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return a function that compares what the commands of a golden file print with that file."""

    async def run(
        name: str,
        fleet: MemoryFleet | None = None,
        programs: Programs = MappingProxyType({}),
        **names: str,
    ) -> None:
        text = (FOLDER / f"{name}.txt").read_text()
        # Paths of one length, on which the widths of columns depend.
        with TemporaryDirectory(dir="/tmp") as folder:
            fleet = fleet or await golden_fleet(text)
            printed = await golden_text(text, fleet, {"DIR": folder, **names}, programs)
            matches_golden(request, name, printed)

    return run
