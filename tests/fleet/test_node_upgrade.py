"""`fleetctl node upgrade` of four Macs under load, over ssh, with real services and engines; and of a broken release."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from tests.support.fleet import Done, Fleet, model_deployment
from tests.support.fleet_load import rolled_out, under_load
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.fleetctl_stream import streaming
from tests.support.release_nodes import ReleaseNode, write_archive
from tests.support.release_wheels import Index

pytestmark = [pytest.mark.full, pytest.mark.fleet, pytest.mark.timeout(600)]

CLOCK = SystemClock()
OLD, NEW, BROKEN = "0.1.1", "0.2.0", "0.2.1"
MANIFEST = model_deployment(replicas=4, contextLength=512, minAvailable=1)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Return the archives of three releases; the agent of the last one exits with 1."""
    root = tmp_path_factory.mktemp("releases")
    with pytest.MonkeyPatch.context() as patch:
        index = Index.create(root / "index", patch)
        yield {
            OLD: write_archive(index, root / "old", OLD),
            NEW: write_archive(index, root / "new", NEW),
            BROKEN: write_archive(index, root / "broken", BROKEN, broken="fleet-nodeagent"),
        }


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), models_dir)
    await made.etcd.start()
    made.start_gateway()
    yield made
    await made.stop()


@pytest.fixture(scope="module")
async def nodes(
    fleet: Fleet, archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[list[ReleaseNode]]:
    """Return four Macs with the old release; the first one has the reconciler as well."""
    root = tmp_path_factory.mktemp("macs")
    made = [ReleaseNode(f"mac-{number}", root / f"mac-{number}") for number in range(1, 5)]
    try:
        for node in made:
            await node.server.start()
            node.install(archives[OLD])
            node.install_agent(fleet)
        made[0].install_reconciler(fleet)
        await fleet.joined(4)
        yield made
    finally:
        for node in made:
            await node.end()


def words_of(nodes: list[ReleaseNode], to: str, *words: str) -> tuple[str, ...]:
    """Return the command as a script would give it."""
    targets = [word for node in nodes for word in ("--target", node.target)]
    keys = [word for node in nodes for word in ("--host-key", node.server.fingerprint)]
    identities = [word for node in nodes for word in ("--identity", str(node.server.key_file))]
    python = ("--python", sys.executable)
    return ("node", "upgrade", "--to", to, *targets, *keys, *identities, *python, *words)


async def upgrade(fleet: Fleet, nodes: list[ReleaseNode], to: str, *words: str) -> Done:
    """Run the command in this process."""
    etcd = ("--etcd", str(fleet.etcd.address))
    return await run_fleetctl(*words_of(nodes, to, *words), *etcd, limit_s=500)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep host keys out of the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLEETCTL_CONFIG", str(tmp_path / "config.toml"))


async def test_four_macs_are_upgraded_under_load_by_a_run_that_is_killed_and_goes_on(
    fleet: Fleet, nodes: list[ReleaseNode], archives: dict[str, Path]
) -> None:
    await fleet.applied(MANIFEST)
    await rolled_out(fleet)
    await fleet.routed("tiny", 4)
    engines = [node.engine_pids() for node in nodes]
    assert [len(pids) for pids in engines] == [1, 1, 1, 1]
    shown = await upgrade(fleet, nodes, str(archives[NEW]), "--dry-run")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[2] == f"  1. reconciler of mac-1: {OLD} -> {NEW}"
    assert [line.split()[1:4] for line in lines[3:7]] == [
        ["nodeagent", "of", f"mac-{number}:"] for number in range(1, 5)
    ]
    assert {node.current() for node in nodes} == {OLD}
    async with under_load(fleet) as asked:
        async with streaming(fleet, *words_of(nodes, str(archives[NEW]), "--yes")) as killed:
            while not (line := await killed.line()).startswith("node/mac-1: nodeagent runs"):
                assert line
        assert [node.current() for node in nodes] in ([NEW, OLD, OLD, OLD], [NEW, NEW, OLD, OLD])
        done = await upgrade(fleet, nodes, str(archives[NEW]), "--yes")
    assert done.code == 0, done.err + done.out
    assert {node.current() for node in nodes} == {NEW}
    assert {node.running("nodeagent") for node in nodes} == {NEW}
    assert nodes[0].running("reconciler") == NEW
    assert [node.engine_pids() for node in nodes] == engines
    assert len(asked) > 4
    again = await upgrade(fleet, nodes, str(archives[NEW]), "--yes")
    assert "nothing to do" in again.out, again.err


async def test_a_release_whose_agent_does_not_start_goes_back_by_itself(
    fleet: Fleet, nodes: list[ReleaseNode], archives: dict[str, Path]
) -> None:
    await fleet.applied(MANIFEST)
    await rolled_out(fleet)
    await fleet.routed("tiny", 4)
    engines = [node.engine_pids() for node in nodes]
    async with under_load(fleet):
        began = CLOCK.monotonic()
        done = await upgrade(fleet, nodes[:2], str(archives[BROKEN]), "--yes", "mac-1", "mac-2")
        took_s = CLOCK.monotonic() - began
    assert done.code == 1
    assert f"node/mac-1: nodeagent {BROKEN} is not Ready" in done.err, done.out + done.err
    assert "not touched: nodeagent of mac-2" in done.err
    assert "It runs 0.1.1 again" in done.err or "It runs 0.2.0 again" in done.err, done.err
    assert took_s < 150
    seen_by = ("its program ends again and again", "service restart nodeagent` failed")
    assert any(words in done.err for words in seen_by), done.err
    assert nodes[0].current() == nodes[1].current() == nodes[2].current()
    assert nodes[0].running("nodeagent") == nodes[2].running("nodeagent") != BROKEN
    assert nodes[0].running("reconciler") == nodes[0].current()
    assert [node.engine_pids() for node in nodes] == engines
