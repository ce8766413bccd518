"""The start of an agent: refused flags and folders, their messages, and one agent per name."""

import asyncio
import stat
import sys
from pathlib import Path

import pytest

from machinery import processes
from nodeagent import __main__ as nodeagent_main
from store import keys
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support import forker
from tests.support.nodeagent_agents import AgentProcess, Desk
from tests.support.waiting import until, until_async


async def start(state_dir: Path, *flags: str) -> tuple[int, str]:
    """Run an agent whose etcd is nowhere until it refuses; return its code and last words."""
    words = ["--etcd", "unix:/nowhere/at-all", "--state-dir", str(state_dir), *flags]
    if forker.is_sound():
        async with asyncio.timeout(60):
            code, _, told = await forker.SHARED.run(words, module="nodeagent")
    else:
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nodeagent", *words), stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            _, told = await agent.communicate()
        code = agent.returncode or 0
    said = told.decode()
    assert "Traceback" not in said
    return code, said.strip().splitlines()[-1]


@pytest.mark.parametrize(("flags", "code", "words"), [
    (["--name", "Mac Studio"], 1, 'try "mac-studio"'),
    (["--memory", "plenty"], 2, "--memory: 'plenty' is not a quantity; write bytes as in"),
    (["--memory", "-1Gi"], 2, "--memory: '-1Gi' is not a quantity"),
    (["--label", "rack"], 2, "--label rack: write KEY=VALUE as in rack=a1"),
    (["--label", "ra ck=1"], 2, "--label ra ck=1: String should match pattern"),
    (["--label", "rack=a b"], 2, "--label rack=a b: String should match pattern"),
    (["--engine-port", "80"], 2, "80 is not in the range"),
    (["--address", "192.0.2.7"], 2, "this node has no identity"),
    (["--address", "mac-1.local"], 2, "--insecure-engines"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)  # fmt: skip
async def test_refusals(tmp_path: Path, flags: list[str], code: int, words: str) -> None:
    got, said = await start(tmp_path, *flags)
    assert (got, words in said) == (code, True), said


def test_the_lease_names_every_flag_that_switches_protection_off() -> None:
    options = {"insecure_http": False, "insecure_metrics": True, "metrics_token_file": None}
    assert nodeagent_main.insecure_flags({**options, "insecure_engines": False}) == (
        "--insecure-metrics",
    )
    assert nodeagent_main.insecure_flags({**options, "insecure_engines": True}) == (
        "--insecure-metrics",
        "--insecure-engines",
    )


@pytest.mark.ci
@pytest.mark.etcd
@pytest.mark.mlx
@pytest.mark.timeout(600)
async def test_two_agents_never_share_a_name(
    etcd: EmbeddedEtcd, desk: Desk, tmp_path: Path, models_dir: Path
) -> None:
    first = AgentProcess(etcd, tmp_path / "one", models_dir, "twin")
    second = AgentProcess(etcd, tmp_path / "two", models_dir, "twin")
    try:
        first.start()
        held = await until_async(lambda: desk.store.get(keys.node_lease_key("twin")), limit_s=120)
        await desk.assign("tiny-0", uid="u1", node="twin")
        await desk.until_published("tiny-0")
        refused = second.start(tells_code=True)
        await until(lambda: not refused.running(), limit_s=120)
        assert refused.exit_code() == 1
        words = processes.last_lines(second.log, 1)
        assert words.startswith("nodeagent: the name twin is taken by a live agent on this machine")
        assert "--state-dir" in words
        assert "--name" in words
        assert "Traceback" not in second.log.read_text()
        assert second.engines() == []
        assert await desk.store.get(keys.node_lease_key("twin")) == held
        # The one that was there is not impressed, and may come back at once.
        pid = (await first.engine()).child.record.pid
        await first.kill()
        first.start()

        async def taken_over() -> bool:
            now = await desk.store.get(keys.node_lease_key("twin"))
            return now is not None and now.mod_revision > held.mod_revision

        await desk.until(taken_over, "the restarted agent holds the name")
        assert (await first.engine()).child.record.pid == pid
    finally:
        await first.end()
        await second.end()


def test_the_state_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """The logs in it name models and requests."""
    nodeagent_main._lock(tmp_path / "state").close()
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_two_agents_never_share_a_folder(
    etcd: EmbeddedEtcd, desk: Desk, tmp_path: Path, models_dir: Path
) -> None:
    agent = AgentProcess(etcd, tmp_path / "state", models_dir, "lone")
    try:
        agent.start()
        await until_async(lambda: desk.store.get(keys.node_lease_key("lone")), limit_s=120)
        code, words = await start(tmp_path / "state", "--name", "lone")
        assert code == 1
        assert words == (
            f"nodeagent: another agent uses {tmp_path}/state; give each agent its own --state-dir"
        )
    finally:
        await agent.end()
