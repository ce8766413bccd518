"""`fleetctl init-auth` on a real etcd: what it makes, that it can be run again, and what it refuses."""

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleetctl.__main__ import main
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.etcd_accounts import PasswordFolder
from fleetctl.verbs.init_auth import InitAuthRequest, initialize_auth
from store import keys
from store.errors import PermissionDeniedError
from store.etcd import users as etcd_users
from store.etcd.connect import connect
from store.etcd.grpc.admin import AuthClient
from store.etcd.users import Right, key_permission, prefix_permission
from tests.support import store_admin
from tests.support.fleet import fleetctl
from tests.support.ports import free_port
from tests.support.store_tcp_etcd import TcpEtcd

USERS = ["fleet-admin", "fleet-gateway", "fleet-node-mac-1", "fleet-reconciler", "root"]
FILES = ["admin.env", "gateway.env", "node-mac-1.env", "reconciler.env", "root.env"]


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[TcpEtcd]:
    async with TcpEtcd(tmp_path, "--bcrypt-cost=4") as found:
        yield found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def order(etcd: TcpEtcd, out: Path, *nodes: str, root: Path | None = None) -> InitAuthRequest:
    """Return an order; `root` is a file with the password to go on with."""
    who = etcd_users.read_credentials(root) if root is not None else None
    where = etcd.address
    if who is not None:
        where = replace(where, username=who.user or "root", password=who.password)
    return InitAuthRequest(
        where=where, folder=PasswordFolder(out), nodes=nodes, rotated=frozenset()
    )


async def done(wanted: InitAuthRequest) -> str:
    """Return what a run said that went well: never a password."""
    said: list[str] = []
    with wanted.folder.held():
        await initialize_auth(wanted, said.append)
    text = "\n".join(said)
    for file in wanted.folder.path.glob("*.env*"):
        assert etcd_users.read_credentials(file).password not in text
    return text


async def refusal(wanted: InitAuthRequest) -> str:
    with pytest.raises(FleetctlError) as refused:
        await done(wanted)
    return refused.value.message


@asynccontextmanager
async def as_root(etcd: TcpEtcd, out: Path) -> AsyncIterator[AuthClient]:
    who = etcd_users.read_credentials(out / "root.env")
    accounts = AuthClient(replace(etcd.address, username=who.user, password=who.password))
    try:
        yield accounts
    finally:
        await accounts.close()


async def is_sound(etcd: TcpEtcd, out: Path, *nodes: str) -> None:
    """Make sure that everything is as it should be: users, roles, permissions and passwords."""
    wanted = {account.user: account for account in etcd_users.fleet_accounts(nodes)}
    async with as_root(etcd, out) as root:
        assert await root.is_on()
        assert await root.users() == {*wanted, "root"}
        assert await root.roles() == {*wanted, "root"}
        assert await root.roles_of("root") == {"root"}
        for user, account in wanted.items():
            assert await root.roles_of(user) == {user}
            assert await root.permissions_of(user) == account.permissions
            found = etcd_users.read_credentials(out / account.file)
            assert found.user == user
            assert await root.is_password(user, found.password)
    assert not list(out.glob("*.next"))


@pytest.mark.etcd
async def test_it_makes_users_and_can_be_run_again(etcd: TcpEtcd, out: Path) -> None:
    words = ("init-auth", "--etcd", etcd.url, "--out", str(out))
    ran = await fleetctl(*words, "--node", "mac-1")
    assert (ran.code, ran.err) == (0, "")
    assert "asks for passwords from now on" in ran.out
    assert f"--etcd-password-file {out / 'admin.env'}" in ran.out
    await is_sound(etcd, out, "mac-1")
    assert sorted(file.name for file in out.glob("*.env")) == FILES
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.glob("*.env")} == {0o600}
    passwords = {etcd_users.read_credentials(file).password for file in out.glob("*.env")}
    assert len(passwords) == len(FILES)
    assert not any(password in ran.out for password in passwords)

    before = contents(out)
    again = await fleetctl(*words)
    assert [line for line in again.out.splitlines() if line.startswith("fleet-")] == [
        f"{user}: unchanged"
        for user in ("fleet-admin", "fleet-reconciler", "fleet-gateway", "fleet-node-mac-1")
    ]
    assert contents(out) == before
    added = await done(order(etcd, out, "mac-2", "mac-1"))
    assert "fleet-node-mac-1: unchanged" in added
    assert "fleet-node-mac-2: 12 permissions granted, user added" in added
    await is_sound(etcd, out, "mac-1", "mac-2")
    assert before.items() < contents(out).items()


def contents(out: Path) -> dict[str, tuple[str, int]]:
    return {file.name: (file.read_text(), file.stat().st_mtime_ns) for file in out.glob("*.env*")}


@pytest.mark.etcd
async def test_roles_that_were_changed_converge(etcd: TcpEtcd, out: Path) -> None:
    await done(order(etcd, out, "mac-1"))
    async with as_root(etcd, out) as root:
        for user in ("fleet-gateway", "fleet-node-mac-1"):
            await root.grant(user, prefix_permission(keys.SPEC_PREFIX, Right.READWRITE))
            await root.grant(user, key_permission(keys.ENDPOINT_PREFIX, Right.READWRITE))
            await root.grant(user, prefix_permission(keys.ENDPOINT_PREFIX, Right.READWRITE))
        await root.revoke(
            "fleet-gateway", prefix_permission(keys.spec_prefix("ModelRoute"), Right.READ)
        )
        await root.grant_role("fleet-gateway", "fleet-admin")
        await root.revoke_role("fleet-node-mac-1", "fleet-node-mac-1")
        await store_admin.delete_role(root, "fleet-reconciler")
    said = await done(order(etcd, out))
    assert "role fleet-admin taken away" in said
    assert "fleet-admin: unchanged" in said
    await is_sound(etcd, out, "mac-1")


@pytest.mark.etcd
async def test_once_passwords_are_asked_for_it_needs_roots(etcd: TcpEtcd, out: Path) -> None:
    await done(order(etcd, out, "mac-1"))
    other, wrong = out.with_name("other"), out.with_name("wrong")
    said = await refusal(order(etcd, other))
    assert "asks for passwords already" in said
    assert "--etcd-password-file" in said
    said = await refusal(order(etcd, other, root=out / "admin.env"))
    assert "permission denied" in said
    wrong.touch(mode=0o600)
    wrong.write_text("x\n")
    assert "refuses user root" in await refusal(order(etcd, other, root=wrong))
    # From elsewhere, a node is added; nobody else's password is touched.
    said = await done(order(etcd, other, "mac-2", root=out / "root.env"))
    assert "fleet-node-mac-2: 12 permissions granted, user added" in said
    assert [file.name for file in other.glob("*.env")] == ["node-mac-2.env"]
    (other / "node-mac-2.env").rename(out / "node-mac-2.env")
    await is_sound(etcd, out, "mac-1", "mac-2")


@pytest.mark.etcd
async def test_new_passwords(etcd: TcpEtcd, out: Path) -> None:
    await done(order(etcd, out, "mac-1"))
    old = contents(out)
    agent = etcd_users.read_credentials(out / "node-mac-1.env")
    transport = connect(replace(etcd.address, username=agent.user, password=agent.password))
    await transport.get(keys.node_lease_key("mac-1"))
    rotated = frozenset({"fleet-node-mac-1", "root"})
    said = await done(replace(order(etcd, out), rotated=rotated))
    assert "fleet-gateway: unchanged" in said
    await is_sound(etcd, out, "mac-1")
    new = contents(out)
    assert {name for name in old if old[name] != new[name]} == {"node-mac-1.env", "root.env"}
    # Who stole the old one is out at once, token and all.
    with pytest.raises(PermissionDeniedError):
        await transport.get(keys.node_lease_key("mac-1"))
    await transport.close()
    said = await refusal(replace(order(etcd, out), rotated=frozenset({"gateway"})))
    assert "no such user. There are root, fleet-admin" in said


@pytest.mark.etcd
async def test_a_password_that_somebody_else_changed_is_not_set_back(
    etcd: TcpEtcd, out: Path
) -> None:
    await done(order(etcd, out))
    async with as_root(etcd, out) as root:
        await root.set_password("fleet-gateway", "theirs")
        assert "gateway.env is not fleet-gateway's any more" in await done(order(etcd, out))
        assert await root.is_password("fleet-gateway", "theirs")
    await done(replace(order(etcd, out), rotated=frozenset({"fleet-gateway"})))
    await is_sound(etcd, out)


@pytest.mark.etcd
async def test_two_fleets_in_one_etcd(etcd: TcpEtcd, out: Path) -> None:
    await done(order(etcd, out, "mac-1"))
    lab = out.with_name("lab")
    words = ("--node", "mac-1", "--etcd-prefix", "/lab", "--etcd", etcd.url, "--out", str(lab))
    ran = await fleetctl("init-auth", *words, "--etcd-password-file", str(out / "root.env"))
    assert ran.code == 0, ran.err
    async with as_root(etcd, out) as root:
        users = [a.user for a in etcd_users.fleet_accounts(["mac-1"], prefix="/lab")]
        assert await root.users() == {*USERS, *users}
    who = etcd_users.read_credentials(lab / "node-mac-1.env")
    transport = connect(replace(etcd.address, username=who.user, password=who.password))
    assert await transport.get(f"/lab{keys.node_lease_key('mac-1')}") is None
    with pytest.raises(PermissionDeniedError):
        await transport.get(keys.node_lease_key("mac-1"))
    await transport.close()


def test_one_at_a_time(out: Path) -> None:
    with PasswordFolder(out).held():
        said = refused("--etcd", "http://127.0.0.1:1", "--out", str(out))
    assert "another `fleetctl init-auth`" in said


def refused(*words: str) -> str:
    ran = CliRunner().invoke(main, ["init-auth", *words])
    assert ran.exit_code in (1, 2), ran.output
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
    return " ".join(ran.output.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param((), "which etcd?", id="no-etcd"),
        pytest.param(("--etcd", "unix:/run/etcd.sock"), "fleetctl up", id="unix"),
        pytest.param(("--etcd", "http://10.0.0.1:2379"), "in clear", id="clear"),
        pytest.param(("--etcd", "http://etcd.lan:2379"), "in clear", id="clear-name"),
        pytest.param(
            ("--etcd", "http://127.0.0.1:1,http://10.0.0.1:1"), "http://10.0.0.1:1", id="one-clear"
        ),
        pytest.param(
            ("--etcd", "http://127.0.0.1:1", "--etcd-transport", "http"), "gRPC", id="way"
        ),
        pytest.param(
            ("--etcd", "http://127.0.0.1:1", "--node", "Mac 1"), "--node Mac 1", id="node"
        ),
        pytest.param(
            ("--etcd", "http://127.0.0.1:1", "--etcd-prefix", "lab/"), "such as /lab", id="prefix"
        ),
        pytest.param(("--etcd", f"http://127.0.0.1:{free_port()}"), "refused", id="nobody"),
    ],
)
def test_what_it_refuses(out: Path, words: tuple[str, ...], said: str) -> None:
    assert said in refused("--out", str(out), *words)
    assert not list(out.glob("*.env"))


def test_folders_that_it_refuses(tmp_path: Path) -> None:
    etcd = ("--etcd", f"http://127.0.0.1:{free_port()}")
    assert "Missing option '--out'" in refused(*etcd)
    (tmp_path / "file").touch()
    assert "is a file" in refused(*etcd, "--out", str(tmp_path / "file"))
    assert "Give a folder of your own" in refused(*etcd, "--out", "/proc/nowhere")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    assert f"chmod 700 {shared}" in refused(*etcd, "--out", str(shared))


def test_insecure_goes_on(out: Path) -> None:
    said = refused("--etcd", "http://127.0.0.2:1,http://nobody.invalid:1", "--out", str(out))
    assert "in clear" in said
    said = refused("--etcd", "http://nobody.invalid:1", "--out", str(out), "--insecure")
    assert "in clear" not in said
    assert "nobody.invalid" in said
