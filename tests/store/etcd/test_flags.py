"""Tests of `store.etcd.flags`: addresses and credentials from the command line and the environment."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from identity.names import Role
from machinery import processes
from machinery.clock import SystemClock
from schemas.wire.identity_files import IdentityFiles
from store.etcd import users
from store.etcd.address import EtcdAddress
from store.etcd.flags import address_from_flags, etcd_options
from store.etcd.users import Credentials, CredentialsError
from tests.support.identities import TestAuthority
from tests.support.store_certificates import Authority

ETCD = ("--etcd", "http://127.0.0.1:1")


def run(
    words: tuple[str, ...], env: dict[str, str], default: EtcdAddress | None = None
) -> tuple[Result, EtcdAddress]:
    """Run a command with the flags; return its output and the address."""
    addresses = [EtcdAddress()]

    @click.command()
    @etcd_options
    def command(**options: Any) -> None:
        addresses.append(address_from_flags(options, default))

    result = CliRunner().invoke(command, words, env=env)
    return result, addresses[-1]


def found(*words: str, default: EtcdAddress | None = None, **env: str) -> EtcdAddress:
    result, address_ = run(words, env, default)
    assert result.exit_code == 0, result.output
    return address_


def refused(*words: str, **env: str) -> str:
    result, _ = run(words, env)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text("s3cret\n")
    return path


def test_child_processes_do_not_inherit_the_password(tmp_path: Path) -> None:
    """Engines and the Git fetcher have no use for it."""
    log = tmp_path / "log"
    children = []

    @click.command()
    @etcd_options
    def command(**options: Any) -> None:
        assert address_from_flags(options).password == "s3cret"
        words = (sys.executable, "-c", "import os; print(sorted(os.environ))")
        children.append(processes.spawn(words, log=log))

    env = {"FLEET_ETCD_USER": "fleet-node-a", "FLEET_ETCD_PASSWORD": "s3cret"}
    assert CliRunner().invoke(command, ETCD, env=env).exit_code == 0
    assert asyncio.run(processes.wait_ended(children[0], SystemClock(), limit_s=20))
    assert "FLEET_ETCD_USER" in log.read_text()
    assert "FLEET_ETCD_PASSWORD" not in log.read_text()


def test_flags_and_environment_have_the_same_effect() -> None:
    by_flags = found(*ETCD, "--etcd-transport", "http", "--etcd-prefix", "/lab")
    by_env = found(
        FLEET_ETCD="http://127.0.0.1:1", FLEET_ETCD_TRANSPORT="http", FLEET_ETCD_PREFIX="/lab"
    )
    assert by_flags == by_env
    assert (by_flags.transport, by_flags.prefix) == ("http", "/lab")


def test_the_default_address_is_the_local_fleet() -> None:
    local = EtcdAddress(socket=Path("/run/etcd.sock"))
    made = found("--etcd-transport", "http", "--etcd-prefix", "/lab", default=local)
    assert made == EtcdAddress(socket=local.socket, transport="http", prefix="/lab")


def test_a_password_is_read_from_a_file(password: Path) -> None:
    made = found(*ETCD, "--etcd-user", "fleet", "--etcd-password-file", str(password))
    assert (made.username, made.password) == ("fleet", "s3cret")
    made = found(*ETCD, FLEET_ETCD_USER="fleet", FLEET_ETCD_PASSWORD_FILE=str(password))
    assert (made.username, made.password) == ("fleet", "s3cret")
    made = found(*ETCD, FLEET_ETCD_USER="fleet", FLEET_ETCD_PASSWORD="env")
    assert (made.username, made.password) == ("fleet", "env")


def test_a_file_of_init_auth_contains_the_user(password: Path) -> None:
    password.write_text(
        users.render_credentials(Credentials(user="fleet-gateway", password="p="), "x")
    )
    made = found(*ETCD, "--etcd-password-file", str(password))
    assert (made.username, made.password) == ("fleet-gateway", "p=")
    made = found(*ETCD, "--etcd-password-file", str(password), "--etcd-user", "other")
    assert (made.username, made.password) == ("other", "p=")


def test_a_user_needs_a_password_and_a_password_a_user(password: Path) -> None:
    assert "give --etcd-user" in refused(*ETCD, FLEET_ETCD_PASSWORD="x")
    assert "give --etcd-user" in refused(*ETCD, "--etcd-password-file", str(password))
    assert "--etcd-password-file FILE" in refused(*ETCD, "--etcd-user", "fleet")
    words = (*ETCD, "--etcd-user", "fleet", "--etcd-password-file", str(password))
    assert "Keep one" in refused(*words, FLEET_ETCD_PASSWORD="x")


@pytest.mark.parametrize(
    "prefix", ["lab", "/", "/lab/", "//lab", "/a b", "/ä", "/-x", "/../x", "/a//b", "/lab\n"]
)
def test_an_invalid_prefix_is_refused(prefix: str) -> None:
    assert "such as /lab or /teams/lab" in refused(*ETCD, "--etcd-prefix", prefix)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1", "write host and port"),
        ("http://127.0.0.1:99999", "write host and port"),
        ("http://127.0.0.1:abc", "write host and port"),
        ("http://:2379", "write host and port"),
        ("http://127.0.0.1:2379/foo", "remove the part after the port"),
        ("http://me:secret@127.0.0.1:2379", "do not put a user into the URL"),
        ("127.0.0.1:2379", "write http://HOST:PORT, https://HOST:PORT or unix:PATH"),
    ],
)
def test_ambiguous_urls_are_refused(url: str, said: str) -> None:
    told = refused("--etcd", url)
    assert said in told
    assert "secret" not in told


def test_a_prefix_within_another_fleet_is_refused() -> None:
    for prefix in ("/mlx-fleet", "/mlx-fleet/v1/spec", "/a/mlx-fleet"):
        assert "choose another name" in refused(*ETCD, "--etcd-prefix", prefix)
    assert found(*ETCD, "--etcd-prefix", "/mlx-fleet-2").prefix == "/mlx-fleet-2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no password"),
        ("\n# nothing\n", "holds no password"),
        ("one\ntwo\n", "expected one line"),
        ("FLEET_ETCD_USER=x\n", "holds no password"),
        ("FLEET_ETCD_PASSWORD=\n", "holds no password"),
    ],
)
def test_files_without_a_password_are_refused(password: Path, text: str, said: str) -> None:
    password.write_text(text)
    with pytest.raises(CredentialsError, match=said):
        users.read_credentials(password)


def test_a_file_that_others_may_read_is_refused(password: Path) -> None:
    password.chmod(0o644)
    said = refused(*ETCD, "--etcd-user", "fleet", "--etcd-password-file", str(password))
    assert "chmod 600" in said
    assert "s3cret" not in said
    password.chmod(0o640)  # on macOS every user is in the group
    with pytest.raises(CredentialsError, match="chmod 600"):
        users.read_credentials(password)


def test_a_tls_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    mine = authority.issue("mine")
    mine.key.chmod(0o644)
    tls = ("--etcd-cert", str(mine.certificate), "--etcd-key", str(mine.key))
    said = refused("--etcd", "https://127.0.0.1:1", "--etcd-ca", str(authority.certificate), *tls)
    assert f"chmod 600 {mine.key}" in said.replace("\n", " ")


def test_unreadable_files_are_refused(tmp_path: Path, password: Path) -> None:
    assert "does not exist" in refused(*ETCD, "--etcd-password-file", str(tmp_path / "nowhere"))
    password.write_bytes(b"\xff\xfe")
    with pytest.raises(CredentialsError, match="is not text"):
        users.read_credentials(password)


def test_passwords_are_not_shown() -> None:
    assert "s3cret" not in repr(Credentials(user="fleet", password="s3cret"))
    assert "s3cret" not in repr(EtcdAddress(username="fleet", password="s3cret"))


def test_an_identity_takes_the_place_of_tls_flags_with_https(tmp_path: Path) -> None:
    folder = TestAuthority(tmp_path).issue(Role.ADMIN, "anna")
    identity = IdentityFiles(folder.authorities, folder.identity)
    other = Authority(tmp_path, "other")
    base: dict[str, Any] = {
        **dict.fromkeys(("etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file")),
        **dict.fromkeys(("etcd_user", "etcd_password", "etcd_prefix"), ""),
        "etcd_transport": "grpc",
    }

    def files(url: str, **given: object) -> tuple[Path | None, ...]:
        options = {**base, **given, "etcd": (url,)}
        address_ = address_from_flags(options, identity=identity)
        return address_.ca, address_.certificate, address_.key

    own = (folder.authorities, folder.identity, folder.identity)
    assert files("https://mac-1:2379") == own
    assert files("http://mac-1:2379") == (None, None, None)
    assert files("https://mac-1:2379", etcd_ca=other.certificate) == (other.certificate, *own[1:])
    issued = other.issue("client")
    given = {"etcd_cert": issued.certificate, "etcd_key": issued.key}
    assert files("https://mac-1:2379", **given) == (own[0], issued.certificate, issued.key)
