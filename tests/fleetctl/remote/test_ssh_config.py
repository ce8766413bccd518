"""Tests of ~/.ssh/config: aliases, keys and jump hosts, with OpenSSH's own reader and real ssh servers."""

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fleetctl.remote.errors import HostKeyError, RemoteError
from fleetctl.remote.session import SshPolicy, connect
from fleetctl.remote.ssh_config import read_ssh_host
from fleetctl.remote.target import RemoteTarget, parse_target
from tests.support.ssh_server import SshServer, ssh_server

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
MAC = parse_target("admin@mac-3")


@dataclass
class Machines:
    """A Mac, a bastion before it, and the configuration that names them."""

    mac: SshServer
    bastion: SshServer
    file: Path

    def write(self, *more: str) -> None:
        """Write the configuration; `more` are lines about the Mac."""
        mac, bastion = self.mac, self.bastion
        lines = [
            "Host mac-3",
            "  HostName 127.0.0.1",
            f"  Port {mac.port}",
            f"  IdentityFile {mac.key_file}",
            *(f"  {line}" for line in more),
            "Host bastion",
            "  HostName localhost",
            "  User admin",
            f"  Port {bastion.port}",
            f"  IdentityFile {bastion.key_file}",
        ]
        self.file.write_text("\n".join(lines) + "\n")

    def policy(self, *fingerprints: str) -> SshPolicy:
        hosts = self.mac.hosts(*(fingerprints or (self.mac.fingerprint, self.bastion.fingerprint)))
        return SshPolicy(hosts=hosts, config=self.file, connect_limit_s=10.0)


@pytest.fixture
async def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machines]:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    async with AsyncExitStack() as stack:
        for name in ("mac", "bastion"):
            (tmp_path / name).mkdir()
        mac, bastion = [
            await stack.enter_async_context(ssh_server(tmp_path / name))
            for name in ("mac", "bastion")
        ]
        yield Machines(mac, bastion, tmp_path / "config")


async def test_an_alias_gives_address_port_and_key(machines: Machines) -> None:
    machines.write()
    async with connect(MAC, machines.policy()) as mac:
        assert (await mac.run(("echo", "here"))).out == "here\n"
        assert mac.target == MAC  # messages name what the user typed
    assert machines.mac.logins == ["admin"]


async def test_a_port_on_the_command_line_counts_more(machines: Machines) -> None:
    machines.write()
    ssh_host = await read_ssh_host(replace(MAC, port=2222), machines.file)
    assert ssh_host.target == RemoteTarget(user="admin", host="127.0.0.1", port=2222)


async def test_a_session_goes_through_the_jump_host(machines: Machines) -> None:
    machines.write("ProxyJump bastion")
    async with connect(MAC, machines.policy()) as mac:
        assert (await mac.run(("echo", "here"))).out == "here\n"
    assert set(machines.bastion.tunnels) == {("127.0.0.1", machines.mac.port)}
    assert machines.bastion.logins == ["admin"]


@pytest.mark.parametrize("known", ["mac", "bastion"])
async def test_every_host_on_the_way_proves_its_key(machines: Machines, known: str) -> None:
    machines.write("ProxyJump bastion")
    server: SshServer = getattr(machines, known)
    with pytest.raises(HostKeyError, match=r"names another one\. Nothing was sent"):
        async with connect(MAC, machines.policy(server.fingerprint)):
            pass
    assert machines.mac.logins == []
    assert bool(machines.bastion.logins) == (known == "bastion")


async def test_jump_hosts_in_a_circle_are_refused(machines: Machines) -> None:
    machines.file.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(RemoteError, match="lead to each other in a circle"):
        async with connect(parse_target("admin@a"), machines.policy()):
            pass


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ProxyCommand nc %h %p", "a ProxyCommand, which fleetctl does not run. Use ProxyJump"),
        ("Port many", "ssh cannot read .*config.* line"),
        ("HostName -oProxyCommand=x", "no address|ssh cannot read"),
        ("ProxyJump admin@-x", "ProxyJump|ssh cannot read"),
    ],
)
async def test_what_cannot_be_followed_is_refused(
    machines: Machines, line: str, words: str
) -> None:
    machines.file.write_text(f"Host mac-3\n  {line}\n")
    with pytest.raises(RemoteError, match=words):
        await read_ssh_host(MAC, machines.file)


async def test_a_match_that_hangs_is_given_up(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetctl.remote.ssh_config._LIMIT_S", 0.2)
    machines.file.write_text('Match exec "sleep 60"\n  Port 2222\n')
    with pytest.raises(RemoteError, match=re.escape("Does a `Match exec` hang?")):
        await read_ssh_host(MAC, machines.file)


async def test_without_a_file_the_target_is_what_was_typed(tmp_path: Path) -> None:
    for file in (None, tmp_path / "missing"):
        assert (await read_ssh_host(MAC, file)).target == MAC
