"""`fleetctl node add` and `node remove` against real machines: sshd, sudo, install.sh, join, and an agent that serves."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import ssh_machine
from tests.support.fleet import Done
from tests.support.release_wheels import Index
from tests.support.ssh_machine import SshMachine
from tests.support.two_macs import Mac, two_macs
from tests.support.waiting import until

pytestmark = [
    pytest.mark.full,
    pytest.mark.fleet,
    pytest.mark.etcd,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ssh_machine.available(), reason="needs namespaces, sshd and sudo"),
]

ALREADY = "all 11 steps were done already"
# What the agent and the system write while they run; the rest must not change by itself.
LIVING = (
    *(
        "/var/lib/mlx-fleet/nodeagent",
        "/var/lib/mlx-fleet/home",
        "/tmp",
        "/var/log",
        "/root",
        "/work",
    ),
    # sudo's memory, and the copies that useradd makes of the files that it changes.
    *("/var/lib/sudo", "/home/admin/.sudo_as_admin_successful", "/etc/passwd-", "/etc/shadow-"),
    *("/etc/group-", "/etc/gshadow-", "/etc/subuid-", "/etc/subgid-"),
)


@dataclass(slots=True)
class Stand:
    """A fleet on one machine, and another machine that only has sshd."""

    first: Mac
    second: Mac
    """The place of the machine in the network."""
    machine: SshMachine
    bundle: Path

    def words(self, *more: str) -> tuple[str, ...]:
        return (
            *("node", "add", self.machine.target, "--data-dir", str(self.first.data)),
            *("--identity", str(self.machine.key_file), "--bundle", str(self.bundle)),
            *("--host-key", self.machine.host_key.get_fingerprint(), "--allow-linux"),
            *("--python", str(Path(sys.executable).resolve()), *more),
        )

    async def add(self, *more: str) -> Done:
        return await self.first.run(*self.words(*more), limit_s=240)

    def processes(self) -> str:
        """Return the command lines of all processes of the other machine."""
        return self.machine.inside("ps", "-axww", "-o", "args=")

    async def remove(self, *more: str) -> Done:
        return await self.first.run(*self.remove_words(*more), limit_s=240)

    def remove_words(self, *more: str) -> tuple[str, ...]:
        identity = ("--identity", str(self.machine.key_file))
        return (
            *("node", "remove", self.machine.target, *identity),
            *("--data-dir", str(self.first.data), *more),
        )

    async def run_until(
        self,
        words: Sequence[str],
        mark: str,
        act: Callable[[], None] | None = None,
        there: str = "",
    ) -> str:
        """Run a command until it prints `mark`; then act and let it go on, or kill it. Return its output.

        With `there` it is killed once a process with these words runs on the other machine.
        """
        process = await asyncio.create_subprocess_exec(
            *(*self.first.prefix, sys.executable, "-u", "-m", "fleetctl", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self.first.environment(),
        )
        assert process.stdout is not None
        seen = ""
        async with asyncio.timeout(240):
            while line := (await process.stdout.readline()).decode():
                seen += line
                if mark in line and act is not None:
                    act()
                elif mark in line:
                    await until(lambda: there in self.processes(), what=there)
                    process.send_signal(signal.SIGKILL)
            await process.wait()
        assert mark in seen, seen
        return seen


@pytest.fixture
async def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    bundle = Index.create(tmp_path / "index", monkeypatch).runnable(tmp_path)
    async with two_macs(tmp_path, tmp_path / "models") as (first, second):
        await first.up()
        with ssh_machine.ssh_machine(tmp_path / "machine", second.address, second.prefix) as made:
            yield Stand(first, second, made, bundle)


async def secrets_in_arguments(stop: asyncio.Event) -> list[str]:
    """Return command lines with a join token, which all processes of this machine can read, until the event."""
    secrets = set()
    while not stop.is_set():
        for folder in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                try:
                    text = (folder / name).read_bytes().decode(errors="replace")
                except OSError:
                    continue
                secrets |= set(re.findall(r"mf1\.[\w.-]{40,}", text))
        await asyncio.sleep(0.01)
    return sorted(secrets)


def written_tokens(machine: SshMachine) -> list[str]:
    """Return the files of the machine that hold a join token."""
    files = [path for path in machine.upper.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if re.search(rb"mf1\.[\w.-]{40,}", path.read_bytes())]


async def test_a_machine_becomes_a_node_and_leaves_without_a_trace(stand: Stand) -> None:
    before = stand.machine.tree(*LIVING)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(secrets_in_arguments(stop))
        done = await stand.add()
        stop.set()
    assert done.code == 0, done.out + done.err + stand.machine.log
    assert watching.result() == []
    assert written_tokens(stand.machine) == []
    assert "mf1." not in done.out + done.err + stand.machine.log
    assert "node/mac-2 is Ready" in done.out
    assert re.findall(r"^ ?(\d+)/11", done.out, re.MULTILINE) == [str(n) for n in range(1, 12)]
    ready = stand.machine.tree(*LIVING)
    again = await stand.add()
    assert ALREADY in again.out, again.out + again.err
    assert stand.machine.tree(*LIVING) == ready
    removed = await stand.remove()
    assert removed.code == 0, removed.out + removed.err
    assert "node/mac-2 deleted" in removed.out
    nodes = await stand.first.ok("get", "nodes")
    assert "mac-2" not in nodes
    after = stand.machine.tree(*LIVING)
    assert after.keys() - before.keys() <= {"/var/lib/mlx-fleet", "/var/lib/mlx-fleet/models"}
    assert {name: one for name, one in after.items() if name in before} == before


async def test_a_run_that_is_killed_within_a_step_is_finished_by_the_next(stand: Stand) -> None:
    before = stand.machine.tree(*LIVING)
    for mark, there in (
        ("5/11", "install.sh --python"),
        ("6/11", "service prepare"),
        ("7/11", "fleetctl join"),
        ("8/11", "service install"),
    ):
        await stand.run_until(stand.words(), mark, there=there)
    done = await stand.add()
    assert done.code == 0, done.out + done.err
    assert ALREADY in (await stand.add()).out
    # A removal goes on as well, although the machine no longer says which node it was.
    await stand.run_until(stand.remove_words(), "nodeagent uninstalled")
    removed = await stand.remove()
    assert removed.code == 0, removed.out + removed.err
    assert "mac-2" not in await stand.first.ok("get", "nodes")
    after = stand.machine.tree(*LIVING)
    assert after.keys() - before.keys() <= {"/var/lib/mlx-fleet", "/var/lib/mlx-fleet/models"}


async def test_refusals_name_the_remedy_and_change_nothing(stand: Stand) -> None:
    machine = stand.machine
    before = machine.tree(*LIVING)
    # A user whose keys are refused.
    other = await stand.first.run(
        *stand.words()[:2], f"nobody@{machine.address}", *stand.words()[3:], limit_s=60
    )
    assert other.code == 1
    assert "step 1 of 11 (reach the machine) failed" in other.out
    assert "ssh-copy-id" in other.out
    # A user that may not become root.
    machine.inside("rm", "/etc/sudoers.d/admin")
    denied = await stand.add()
    assert denied.code == 1
    assert "step 2 of 11 (become root) failed" in denied.out
    machine.inside("/bin/sh", "-c", "echo 'admin ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/admin; chmod 440 /etc/sudoers.d/admin")  # fmt: skip
    # A disk without space.
    machine.resize_disk("1g")
    full = await stand.add()
    assert full.code == 1
    assert "step 4 of 11 (preflight) failed" in full.out
    assert "Free some space" in full.out
    machine.resize_disk("40g")
    assert machine.tree(*LIVING) == before
    # Another host key at the same address.
    machine.stop()
    machine.new_host_key()
    machine.start()
    stolen = await stand.add()
    assert stolen.code == 1
    assert "has changed its host key" in stolen.out
    assert "Accepted" not in machine.log
    assert "Connection closed by authenticating user" not in machine.log


async def test_a_connection_that_is_cut_in_a_step_is_noticed(stand: Stand) -> None:
    seen = await stand.run_until(stand.words(), "4/11", stand.second.cut)
    assert re.search(r"step \d+ of 11 .* failed: the connection to .* broke", seen), seen
    stand.second.mend()
    done = await stand.add()
    assert done.code == 0, done.out + done.err
    assert ALREADY in (await stand.add()).out
