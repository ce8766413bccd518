"""Tests of sessions against OpenSSH and sudo, on a machine of its own."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from fleetctl.remote.disk_unlock import unlock
from fleetctl.remote.errors import (
    HostKeyError,
    LoginRefusedError,
    RemoteError,
    SudoRefusedError,
    UnreachableHostError,
)
from fleetctl.remote.host_keys import KnownHosts
from fleetctl.remote.session import RemoteMac, SshPolicy, connect
from fleetctl.remote.target import RemoteTarget
from tests.support import ssh_machine
from tests.support.netns import Networks
from tests.support.ssh_machine import SshMachine
from tests.support.ssh_server import Answers

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not ssh_machine.available(), reason="needs namespaces, sshd and sudo"),
]
PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def networks() -> Iterator[Networks]:
    # One for all tests: the kernel takes its time to end a namespace.
    with Networks(1).made() as made:
        yield made


@pytest.fixture
def machine(tmp_path: Path, networks: Networks) -> Iterator[SshMachine]:
    place = networks.place(0)
    with ssh_machine.ssh_machine(tmp_path / "machine", place.client_host, place.prefix) as made:
        yield made


def target(machine: SshMachine) -> RemoteTarget:
    return RemoteTarget(user="admin", host=machine.address)


def policy(machine: SshMachine, *expected: str, prompts: Answers | None = None) -> SshPolicy:
    fingerprints = expected or (machine.host_key.get_fingerprint(),)
    known = KnownHosts(own=machine.base / "known_hosts", expected=frozenset(fingerprints))
    return SshPolicy(hosts=known, identities=(machine.key_file,), prompts=prompts)


def logins(machine: SshMachine) -> list[str]:
    """Return what sshd has logged about users."""
    pattern = r"(?:Accepted|Failed|Postponed|authenticating user|Invalid user).*"
    return re.findall(pattern, machine.log)


async def test_no_credentials_reach_a_host_with_another_key(machine: SshMachine) -> None:
    async with connect(target(machine), policy(machine)) as mac:
        assert (await mac.run(("id", "-un"))).out == "admin\n"
    assert any(line.startswith("Accepted publickey for admin") for line in logins(machine))
    machine.stop()
    machine.new_host_key()
    machine.start()
    with pytest.raises(HostKeyError, match="has changed its host key"):
        async with connect(target(machine), policy(machine, prompts=Answers(yes=True))):
            pass
    assert logins(machine) == []


async def test_sudo_takes_the_password_from_standard_input(machine: SshMachine) -> None:
    machine.inside("/bin/sh", "-c", f"echo 'admin:{PASSWORD}' | chpasswd; echo 'admin ALL=(ALL) ALL' > /etc/sudoers.d/admin")  # fmt: skip
    person = Answers(password=PASSWORD)
    async with connect(target(machine), policy(machine, prompts=person)) as mac:
        script = "id -u; cat; cat /proc/*/cmdline | tr '\\0' ' '"
        result = await mac.run(("/bin/sh", "-c", script), stdin=b"input\n", sudo=True)
    assert result.out.startswith("0\ninput\n"), result
    assert PASSWORD not in result.out
    assert len(person.questions) == 1
    person.password = "wrong"
    async with connect(target(machine), policy(machine, prompts=person)) as mac:
        with pytest.raises(SudoRefusedError, match="cannot become root"):
            await mac.run(("true",), sudo=True)
    async with connect(target(machine), policy(machine)) as mac:
        with pytest.raises(SudoRefusedError, match="Run this in a terminal"):
            await mac.run(("true",), sudo=True)
    machine.inside("rm", "/etc/sudoers.d/admin")
    person.password = PASSWORD
    async with connect(target(machine), policy(machine, prompts=person)) as mac:
        with pytest.raises(SudoRefusedError, match="not in the sudoers file"):
            await mac.run(("true",), sudo=True)


async def test_openssh_gets_the_password_for_filevault_and_no_key(machine: SshMachine) -> None:
    machine.inside("/bin/sh", "-c", f"echo 'admin:{PASSWORD}' | chpasswd")
    machine.stop()
    settings = machine.upper / "etc" / "machine-sshd"
    text = settings.read_text().replace("PasswordAuthentication no", "PasswordAuthentication yes")
    settings.write_text(text + "Banner /etc/machine-banner\n")
    machine.write("/etc/machine-banner", "This system is locked.\n")
    init = machine.upper / "etc" / "machine-init"  # it closes the account to passwords
    init.write_text(init.read_text().replace("usermod -p '*' admin\n", ""))
    machine.start()
    person = Answers(password="wrong")
    with pytest.raises(LoginRefusedError, match="refuses the password of admin"):
        await unlock(target(machine), policy(machine, prompts=person))
    person.password = PASSWORD
    assert await unlock(target(machine), policy(machine, prompts=person)) == "Unlocked"
    ways = re.findall(r"(?:Accepted|Failed) \w+ for \w+", machine.log)
    assert ways == ["Failed password for admin", "Accepted password for admin"]
    assert len(person.questions) == 2
    assert PASSWORD not in machine.log


async def test_a_full_disk_ends_an_upload_in_words(machine: SshMachine, tmp_path: Path) -> None:
    local = tmp_path / "archive.tar"
    local.write_bytes(bytes(64 << 20))
    path = PurePosixPath("uploads/archive.tar")
    async with connect(target(machine), policy(machine)) as mac:
        machine.resize_disk("32m")
        with pytest.raises(RemoteError, match="MiB are free there"):
            await mac.upload(local, path)
        folder = machine.upper / "home" / "admin" / "uploads"
        assert list(folder.iterdir()) == []
        machine.resize_disk("1g")
        assert await mac.upload(local, path)
    assert [one.name for one in folder.iterdir()] == ["archive.tar"]
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_a_machine_without_a_cable_is_noticed(
    machine: SshMachine, networks: Networks
) -> None:
    async with connect(target(machine), policy(machine)) as mac:
        assert isinstance(mac, RemoteMac)
        networks.cut_clients(0)
        with pytest.raises(UnreachableHostError, match="broke"):
            await mac.run(("sleep", "600"), limit_s=120.0)
        networks.mend_clients(0)
    async with connect(target(machine), policy(machine)) as mac:
        assert (await mac.run(("true",))).is_ok
