"""One download of a fleet of real agents with identities, and one of them as a mirror for the real huggingface_hub."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from identity.names import Role
from machinery.clock import SystemClock
from models.model_store.store import ModelStore
from schemas.node import NodeStatus
from store import codec, keys
from store.etcd.connect import connect
from tests.support.fleet import Fleet
from tests.support.hub import COMMIT, REPO, StandInHub, run_hub_client, tiny_files
from tests.support.identities import TestAuthority
from tests.support.model_store import files_below

pytestmark = [pytest.mark.fleet, pytest.mark.full, pytest.mark.etcd, pytest.mark.timeout(180)]

MACS = ("node-1", "node-2", "node-3")


async def api_port(fleet: Fleet, node: str) -> int:
    store = connect(fleet.etcd.address)
    try:
        item = await store.get(keys.status_key("Node", node))
    finally:
        await store.close()
    assert item is not None
    return urlsplit(codec.decode(NodeStatus, item).agent_url).port or 0


async def test_agents_fetch_a_model_once_and_give_it_to_other_programs(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files(weights=40 << 20)})
    # Code and descriptions are left out.
    files = {p: c for p, c in hub.repos[REPO].items() if not p.endswith((".py", ".md"))}
    authority, fleet = TestAuthority(tmp_path / "ids"), Fleet(tmp_path / "f", tmp_path)
    async with hub.serve():
        try:
            await fleet.etcd.start()
            store = connect(fleet.etcd.address)
            await authority.publish(store)
            await store.close()
            fleet.start_reconciler()
            for node in MACS:
                identity = str(authority.issue(Role.NODE, node).path)
                places = ("--models-dir", str(tmp_path / node), "--identity-dir", identity)
                fleet.start_agent(node, *places, "--serve-hub")
            await fleet.joined(len(MACS))
            admin = authority.issue(Role.ADMIN, "anna").path
            pull = ("models", "pull", REPO, "--all", "--hub-endpoint", hub.endpoint)
            done = await fleet.ctl(*pull, "--identity-dir", str(admin), limit_s=100)
            assert (done.code, done.out.count("present")) == (0, 3), done.err + fleet.words()
            for node in MACS:
                (model,) = ModelStore(tmp_path / node, SystemClock()).models()
                assert files_below(model.folder) == files
            assert hub.body_bytes <= 1.02 * sum(map(len, files.values()))

            before = hub.body_bytes
            (folder,) = await run_hub_client(
                f"https://127.0.0.1:{await api_port(fleet, MACS[2])}/hub",
                tmp_path / "cache",
                COMMIT,
                IDENTITY=str(admin),
                NODE=authority.identity(Role.NODE, MACS[2]).dns_name,
            )
            assert files_below(folder) == files
            assert hub.body_bytes == before
        finally:
            await fleet.stop()
