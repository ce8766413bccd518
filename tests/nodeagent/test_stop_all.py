"""`fleetctl stop --all` against real agents with real engines, while etcd is frozen and after it was killed."""

import os
import signal
import stat
from pathlib import Path

import pytest

from identity.names import Role
from schemas.trust import TlsMode
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support.fleet import Done
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.identities import TestAuthority
from tests.support.nodeagent_agents import AgentProcess, Desk
from tests.support.values import present
from tests.support.waiting import until

pytestmark = [pytest.mark.etcd, pytest.mark.mlx, pytest.mark.full, pytest.mark.timeout(400)]

NODES = ("node-1", "node-2")


async def test_all_engines_end_while_etcd_is_frozen_and_after_it_was_killed(
    etcd: EmbeddedEtcd,
    desk: Desk,
    tmp_path: Path,
    models_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = TestAuthority(tmp_path / "authority")
    await fleet.publish(desk.store, TlsMode.STRICT)
    admin = fleet.issue(Role.ADMIN, "anna")
    monkeypatch.setenv("FLEETCTL_CONFIG", str(tmp_path / "config" / "config.toml"))
    agents = [_agent(fleet, etcd, tmp_path / name, models_dir, name) for name in NODES]

    async def ctl(*words: str) -> Done:
        where = ("--etcd", f"unix:{etcd.address.socket}", "--identity-dir", str(admin.path))
        return await run_fleetctl(*words, *where)

    def count() -> int:
        return sum(len(agent.engines()) for agent in agents)

    try:
        for agent, name in zip(agents, NODES, strict=True):
            agent.start()
            await desk.assign(f"{name}-0", uid=name, node=name)
        for name in NODES:
            await desk.until_published(f"{name}-0")
        assert (await ctl("get", "nodes")).code == 0
        known = tmp_path / "config" / "known-nodes.json"
        assert stat.S_IMODE(known.stat().st_mode) == 0o600
        assert count() == 2
        pid = present(etcd.supervisor.pid)

        os.kill(pid, signal.SIGSTOP)
        done = await ctl("stop", "--all", "--yes")
        assert (done.code, count()) == (0, 0), done.err
        assert done.out.count("1 engine ended, none starts until --undo") == 2
        assert "etcd is away" in done.err
        done = await ctl("stop", "--all", "--undo")
        assert done.out.count("engines may start again") == 2, done.err
        os.kill(pid, signal.SIGCONT)
        await until(lambda: count() == 2, limit_s=120, what="the engines start again")
        for name in NODES:
            await desk.until_published(f"{name}-0")

        os.kill(pid, signal.SIGKILL)
        await until(lambda: not etcd.supervisor.running, what="etcd's end")
        done = await ctl("stop", "--all", "--yes")
        assert (done.code, count()) == (0, 0), done.err
        await agents[1].kill()
        done = await ctl("stop", "--all", "--yes", "--grace-period", "1s")
        assert done.code == 1
        assert "node-1   0 engines ended" in done.out
        assert "node-2   no answer" in done.out
        await etcd.start()
    finally:
        for agent in agents:
            await agent.end()


def _agent(
    fleet: TestAuthority, etcd: EmbeddedEtcd, state: Path, models_dir: Path, name: str
) -> AgentProcess:
    """Return an agent with an identity in its state folder."""
    folder = fleet.issue(Role.NODE, name)
    folder.write_trust(fleet.snapshot(mode=TlsMode.STRICT))
    state.mkdir()
    folder.path.rename(state / "identity")
    port = 20_000 + (os.getpid() + NODES.index(name)) % 200 * 100
    return AgentProcess(etcd, state, models_dir, name, port=port)
