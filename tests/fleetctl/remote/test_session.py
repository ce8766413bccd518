"""Tests of sessions with other Macs, against a real ssh server in this process."""

import ast
import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import asyncssh
import click
import pytest

from fleetctl.remote.errors import (
    HostKeyError,
    LoginRefusedError,
    RemoteError,
    RemoteTimeoutError,
    SudoRefusedError,
    UnreachableHostError,
)
from fleetctl.remote.session import connect
from fleetctl.remote.target import parse_target
from tests.support.ports import free_port
from tests.support.ssh_server import Answers, SshServer, ssh_server
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[SshServer]:
    async with ssh_server(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("me@mac-2.local", "mac-2.local", 22),
        ("me@192.0.2.7:2222", "192.0.2.7", 2222),
        ("me@[fe80::1%en0]:2222", "fe80::1%en0", 2222),
        ("me@2001:db8::7", "2001:db8::7", 22),
    ],
)
def test_targets_name_user_host_and_port(text: str, host: str, port: int) -> None:
    target = parse_target(text)
    assert (target.user, target.host, target.port) == ("me", host, port)
    assert parse_target(str(target)) == target


@pytest.mark.parametrize("text", ["mac-2", "me@", "@mac", "-o@mac", "me@-oProxyCommand=x", "me@mac:0", "me@a b"])  # fmt: skip
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="expected user@host"):
        parse_target(text)


async def test_an_unknown_host_key_is_refused_where_nobody_can_be_asked(server: SshServer) -> None:
    policy = replace(server.policy(), hosts=server.hosts())
    with pytest.raises(HostKeyError, match=re.escape(f"--host-key {server.fingerprint}")):
        async with connect(server.target, policy):
            pass
    assert server.logins == []


async def test_a_person_confirms_an_unknown_host_key_once(server: SshServer) -> None:
    policy = replace(server.policy(), hosts=server.hosts(), prompts=Answers(yes=True))
    for _ in range(2):
        async with connect(server.target, policy) as mac:
            assert (await mac.run(("true",))).is_ok
    assert isinstance(policy.prompts, Answers)
    (question,) = policy.prompts.questions
    assert server.fingerprint in question
    assert policy.hosts.own.stat().st_mode & 0o777 == 0o600


async def test_no_credentials_go_to_a_host_with_a_changed_key(server: SshServer) -> None:
    policy = server.policy()
    async with connect(server.target, policy):
        pass
    server.logins.clear()
    await server.stop()
    old, server.host_key = server.fingerprint, asyncssh.generate_private_key("ssh-ed25519")
    await server.start()
    # Neither a person nor --host-key overrules what is known.
    for again in (server.policy(prompts=Answers(yes=True)), replace(policy, prompts=Answers(yes=True))):  # fmt: skip
        with pytest.raises(HostKeyError) as raised:
            async with connect(server.target, again):
                pass
        text = str(raised.value)
        assert old in text
        assert server.fingerprint in text
        assert text.endswith(f"-R '[127.0.0.1]:{server.port}' -f {policy.hosts.own}")
    assert server.logins == []


async def test_another_type_of_key_is_no_way_around_a_known_one(server: SshServer) -> None:
    async with connect(server.target, server.policy()):
        pass
    await server.stop()
    server.logins.clear()
    await server.start(asyncssh.generate_private_key("ecdsa-sha2-nistp256"))
    with pytest.raises(HostKeyError, match="has changed its host key"):
        async with connect(server.target, server.policy(prompts=Answers(yes=True))):
            pass
    assert server.logins == []


async def test_a_server_with_several_keys_shows_the_known_one(server: SshServer) -> None:
    rsa = asyncssh.generate_private_key("ssh-rsa", key_size=2048)
    own = server.hosts().own
    public = rsa.export_public_key().decode()
    own.write_text(f"# a comment\n[127.0.0.1]:{server.port} {public}")
    await server.stop()
    await server.start(server.host_key, rsa)
    async with connect(server.target, replace(server.policy(), hosts=server.hosts())) as mac:
        assert (await mac.run(("true",))).is_ok


async def test_a_revoked_key_is_refused(server: SshServer) -> None:
    public = server.host_key.export_public_key().decode()
    server.hosts().own.write_text(f"@revoked * {public}")
    with pytest.raises(HostKeyError, match=r"is revoked by .*known_hosts"):
        async with connect(server.target, server.policy(prompts=Answers(yes=True))):
            pass
    assert server.logins == []


async def test_a_refused_key_names_the_remedy(server: SshServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    with pytest.raises(LoginRefusedError, match="ssh-copy-id admin@"):
        async with connect(server.target, replace(server.policy(), identities=(other,))):
            pass


async def test_a_password_is_asked_for(server: SshServer, tmp_path: Path) -> None:
    server.password = "correct horse"
    other = tmp_path / "other"
    other.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    person = Answers(password=server.password)
    policy = replace(server.policy(prompts=person), identities=(other,))
    async with connect(server.target, policy) as mac:
        assert (await mac.run(("echo", "in"))).out == "in\n"
    person.password = "wrong"
    with pytest.raises(LoginRefusedError, match="with the password"):
        async with connect(server.target, policy):
            pass


async def test_a_closed_port_is_named(server: SshServer) -> None:
    target = replace(server.target, port=free_port())
    with pytest.raises(UnreachableHostError, match="Remote Login must be on"):
        async with connect(target, server.policy()):
            pass


async def test_arguments_arrive_as_they_are(server: SshServer) -> None:
    words = ("printf", "%s|", "a b", "$HOME", "`id`", "it's", 'a"b', "*", "", "ü\n;")
    async with connect(server.target, server.policy()) as mac:
        result = await mac.run(words)
        assert result.out == "".join(f"{word}|" for word in words[2:])
        failed = await mac.run(("/bin/sh", "-c", "echo first >&2; echo why >&2; exit 7"))
    assert (failed.code, failed.line) == (7, "why")


async def test_output_is_bounded(server: SshServer) -> None:
    async with connect(server.target, server.policy()) as mac:
        result = await mac.run(("head", "-c", "3000000", "/dev/zero"))
    assert result.is_ok
    assert result.is_truncated
    assert len(result.out) == 1 << 20


async def test_a_command_that_hangs_is_ended(server: SshServer) -> None:
    async with connect(server.target, server.policy()) as mac:
        with pytest.raises(RemoteTimeoutError, match="sleep 600"):
            await mac.run(("sleep", "600"), limit_s=0.2)
        assert (await mac.run(("true",))).is_ok


async def test_a_broken_connection_is_no_result(server: SshServer) -> None:
    async with connect(server.target, server.policy()) as mac:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_outcome(mac.run(("/bin/sh", "-c", "echo begun > begun; sleep 600"))))  # fmt: skip
            await until((server.home / "begun").exists)
            await server.stop()
        assert isinstance(running.result(), UnreachableHostError)
        assert isinstance(await _outcome(mac.run(("true",))), UnreachableHostError)


async def _outcome(call: object) -> object:
    try:
        return await call  # type: ignore[misc]  # a coroutine of the session
    except RemoteError as error:
        return error


async def test_sudo_without_a_password_keeps_the_input(server: SshServer) -> None:
    server.allow_sudo("free")
    async with connect(server.target, server.policy()) as mac:
        assert (await mac.run(("cat",), stdin=b"input", sudo=True)).out == "input"


async def test_sudo_gets_its_password_by_stdin_and_asks_once(server: SshServer) -> None:
    server.allow_sudo("secret word")
    person = Answers(password="secret word")
    async with connect(server.target, server.policy(prompts=person)) as mac:
        results = [await mac.run(("cat",), stdin=b"input", sudo=True) for _ in range(2)]
    assert [result.out for result in results] == ["input", "input"]
    assert "secret" not in repr(results)
    assert len(person.questions) == 1


@pytest.mark.parametrize(("rule", "password", "questions"), [("", "any", 0), ("right", "wrong", 3)])
async def test_sudo_that_is_denied_says_so(
    server: SshServer, rule: str, password: str, questions: int
) -> None:
    server.allow_sudo(rule)
    person = Answers(password=password)
    async with connect(server.target, server.policy(prompts=person)) as mac:
        with pytest.raises(SudoRefusedError, match="cannot become root"):
            await mac.run(("true",), sudo=True)
    assert len(person.questions) == questions


async def test_an_upload_is_renamed_once_it_is_right(server: SshServer, tmp_path: Path) -> None:
    local = tmp_path / "archive.tar"
    local.write_bytes(b"x" * 300_000)
    path = PurePosixPath(".cache/mlx-fleet/archive.tar")
    async with connect(server.target, server.policy()) as mac:
        assert await mac.sha256(path) is None
        assert await mac.upload(local, path)
        there = server.home / path
        assert there.read_bytes() == local.read_bytes()
        assert await mac.sha256(path) == hashlib.sha256(local.read_bytes()).hexdigest()
        assert [one.name for one in there.parent.iterdir()] == ["archive.tar"]
        before = there.stat().st_ino
        assert not await mac.upload(local, path)
        assert there.stat().st_ino == before


async def test_an_upload_that_cannot_be_written_says_why(server: SshServer, tmp_path: Path) -> None:
    local = tmp_path / "archive.tar"
    local.write_bytes(b"x")
    (server.home / "folder").mkdir()
    (server.home / "folder" / ".archive.tar.part").symlink_to("/dev/full")
    async with connect(server.target, server.policy()) as mac:
        with pytest.raises(RemoteError, match="MiB are free there"):
            await mac.upload(local, PurePosixPath("folder/archive.tar"))


def test_no_code_connects_without_checking_host_keys() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.value.lineno}"
        for folder in ("fleetctl", "reconciler", "nodeagent", "gateway", "machinery", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if "known_hosts" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword)
        and node.arg == "known_hosts"
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
    ]
    assert wrong == []
