"""Refusals of `fleetctl down`. A fleet that ends: tests/fleet/test_down_fleet.py, and tests/fleetctl/verbs/test_up.py."""

import json
from pathlib import Path

import pytest

from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec
from store import codec
from store.port import Transport
from tests.support.fleet import fleetctl
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import node_status, put_node

NO_ETCD = ("--etcd", "http://127.0.0.1:1")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the file of a run out of the user's home."""
    monkeypatch.setenv("FLEETCTL_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path


async def test_macs_that_cannot_be_reached_are_named_before_anything_stops(
    shared_fleet: MemoryFleet, shared_transport: Transport, config: Path
) -> None:
    for name in ("mac-1", "mac-2"):
        node = Node(metadata=ObjectMeta(name=name, uid=name, generation=1), spec=NodeSpec())
        await shared_transport.commit([], [codec.put_spec(node), put_node(name, node_status(name))])
    away = node_status("mac-1").model_copy(update={"address": "10.0.0.9"})
    await shared_transport.commit([], [put_node("mac-1", away)])
    nowhere = await shared_fleet.ctl("down", "--fleet")
    assert "node/mac-1: where to log in is unknown" in nowhere.err
    targets = [word for n in (1, 2) for word in ("--target", f"mac-{n}=a@127.0.0.1:{n}")]
    done = await shared_fleet.ctl("down", "--fleet", "--yes", *targets)
    assert done.code == 1
    assert "nothing was changed, because these Macs cannot be reached" in done.err
    assert all(f"\n  node/mac-{n}: " in done.err for n in (1, 2))
    assert not (config / "fleet-down.json").exists()


async def test_a_damaged_file_of_an_earlier_run_counts_as_none(config: Path) -> None:
    (config / "fleet-down.json").write_text(json.dumps({"http://127.0.0.1:1": ["x"]}))
    done = await fleetctl("down", "--fleet", "--yes", *NO_ETCD)
    assert (done.code, "which Macs the fleet has is unknown" in done.err) == (1, True)
