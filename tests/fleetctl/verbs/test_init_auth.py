"""The verb `fleetctl init-auth` with a real etcd: accounts, repeated runs, rotation, and error messages."""

import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleetctl.__main__ import main
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.etcd_accounts import PasswordFolder
from fleetctl.verbs.init_auth import InitAuthRequest
from schemas.meta import ApiModel
from schemas.node import NodeLease
from schemas.records import GatewayLease, ReconcilerLease
from store import codec, keys
from store.errors import PermissionDeniedError
from store.etcd import users as etcd_users
from store.etcd.connect import connect
from store.etcd.users import Right, fleet_accounts, key_permission, prefix_permission
from store.port import Put
from tests.support import store_admin
from tests.support.fleet import Done, fleetctl
from tests.support.fleetctl_init_auth import as_root, check_accounts, request, run_init_auth
from tests.support.store_tcp_etcd import TcpEtcd

NODE_PERMISSIONS = len(fleet_accounts(["mac-2"])[-1].permissions)
USERS = [
    "fleet-admin",
    "fleet-dashboard",
    "fleet-gateway",
    "fleet-node-mac-1",
    "fleet-reconciler",
    "root",
]
FILES = [
    "admin.env",
    "dashboard.env",
    "gateway.env",
    "node-mac-1.env",
    "reconciler.env",
    "root.env",
]


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[TcpEtcd]:
    async with TcpEtcd(tmp_path, "--bcrypt-cost=4") as tcp_etcd:
        yield tcp_etcd


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


async def refusal(asked: InitAuthRequest) -> str:
    with pytest.raises(FleetctlError) as refused:
        await run_init_auth(asked)
    return refused.value.message


@pytest.mark.etcd
async def test_it_creates_users_and_can_run_again(etcd: TcpEtcd, out: Path) -> None:
    where = ("--etcd", etcd.url, "--out", str(out))
    words = ("init-auth", "--prepare", *where)
    ran = await fleetctl(*words, "--node", "mac-1")
    assert (ran.code, ran.err) == (0, "")
    enabled = await fleetctl("init-auth", "--enable", *where)
    assert (enabled.code, enabled.err) == (0, "")
    assert "now enforces passwords" in enabled.out
    assert f"--etcd-password-file {out / 'admin.env'}" in enabled.out
    await check_accounts(etcd, out, "mac-1")
    assert sorted(file.name for file in out.glob("*.env")) == FILES
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.glob("*.env")} == {0o600}
    passwords = {etcd_users.read_credentials(file).password for file in out.glob("*.env")}
    assert len(passwords) == len(FILES)
    assert not any(password in ran.out + enabled.out for password in passwords)

    before = contents(out)
    again = await fleetctl(*words)
    assert [line for line in again.out.splitlines() if line.startswith("fleet-")] == [
        f"{user}: unchanged"
        for user in (
            "fleet-admin",
            "fleet-reconciler",
            "fleet-gateway",
            "fleet-dashboard",
            "fleet-node-mac-1",
        )
    ]
    assert contents(out) == before
    added = await run_init_auth(request(etcd, out, "mac-2", "mac-1"))
    assert "fleet-node-mac-1: unchanged" in added
    assert f"fleet-node-mac-2: {NODE_PERMISSIONS} permissions granted, user added" in added
    await check_accounts(etcd, out, "mac-1", "mac-2")
    assert before.items() < contents(out).items()


@pytest.mark.ci
@pytest.mark.etcd
async def test_the_dashboard_may_write_only_if_that_was_said(etcd: TcpEtcd, out: Path) -> None:
    words = ("init-auth", "--etcd", etcd.url, "--out", str(out), "--prepare")
    without = await fleetctl(*words)
    assert "fleet-dashboard: " in without.out
    declared = keys.spec_key("ModelDeployment", "qwen")
    granted = await fleetctl(*words, "--dashboard-writes")
    assert "permissions granted" in dashboard_line(granted.out)
    # A later run without a word about it changes nothing.
    assert "permissions" not in dashboard_line((await fleetctl(*words)).out)
    revoked = await fleetctl(*words, "--no-dashboard-writes")
    assert "permissions revoked" in dashboard_line(revoked.out)
    await fleetctl(*words, "--dashboard-writes")
    assert (await fleetctl(*words[:-1], "--enable")).code == 0
    credentials = etcd_users.read_credentials(out / "dashboard.env")
    transport = connect(
        replace(etcd.address, username=credentials.user, password=credentials.password)
    )
    try:
        await transport.commit([], [Put(key=declared, value=b"{}")])
        with pytest.raises(PermissionDeniedError):
            await transport.commit([], [Put(key=keys.named(keys.API_KEY_PREFIX, "x"), value=b"{}")])
    finally:
        await transport.close()
    refused = await fleetctl(*words[:-1], "--dashboard-writes")
    assert "--dashboard-writes needs --prepare" in refused.err


def dashboard_line(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("fleet-dashboard"))


async def register(etcd: TcpEtcd, *, with_passwords: bool) -> None:
    """Write the leases of a fleet's processes."""
    node = NodeLease(uid="u", session="s", has_store_password=with_passwords)
    gateway = GatewayLease(
        url="http://10.0.0.5:4000", version="1", has_store_password=with_passwords
    )
    reconcilers = [
        ReconcilerLease(identity=f"host/{pid} 1", has_store_password=with_passwords)
        for pid in (1, 2)
    ]
    transport = connect(replace(etcd.address, username="", password=""))
    leases: list[tuple[str, ApiModel]] = [
        (keys.node_lease_key("mac-1"), node),
        (keys.named(keys.GATEWAY_LEASE_PREFIX, "g1"), gateway),
        *((keys.named(keys.RECONCILER_LEASE_PREFIX, r.identity[5:6]), r) for r in reconcilers),
    ]
    puts = [Put(key=key, value=codec.encode(lease)) for key, lease in leases]
    puts.append(Put(key=keys.ELECTION_RECONCILER, value=b"host/1 1"))
    await transport.commit([], puts)
    await transport.close()


async def step(etcd: TcpEtcd, out: Path, *words: str) -> Done:
    return await fleetctl("init-auth", *words, "--etcd", etcd.url, "--out", str(out))


@pytest.mark.ci
@pytest.mark.etcd
async def test_each_run_without_a_step_says_which_one_is_next(etcd: TcpEtcd, out: Path) -> None:
    await register(etcd, with_passwords=False)
    first = await step(etcd, out)
    assert "has no users yet" in first.out
    assert f"fleetctl init-auth --prepare --out {out} --etcd {etcd.url} --node NAME" in first.out
    assert not list(out.glob("*.env"))
    prepared = await step(etcd, out, "--prepare", "--node", "mac-1")
    second = await step(etcd, out)
    for said in (prepared.out, second.out):
        assert "does not enforce passwords yet" in said
        assert "agent of node mac-1 has no password yet" in said
        assert f"then run: fleetctl init-auth --enable --out {out}" in said
    await register(etcd, with_passwords=True)
    assert "done: every live process has a password" in (await step(etcd, out)).out
    assert (await step(etcd, out, "--enable")).code == 0
    last = await step(etcd, out)
    assert "enforces passwords, as before" in last.out


@pytest.mark.ci
@pytest.mark.etcd
async def test_enable_refuses_while_a_process_has_no_password(etcd: TcpEtcd, out: Path) -> None:
    early = await step(etcd, out, "--enable")
    assert early.code == 1
    assert f"Run `fleetctl init-auth --prepare --out {out}" in early.err
    await step(etcd, out, "--prepare", "--node", "mac-1")
    await register(etcd, with_passwords=False)
    refused = await step(etcd, out, "--enable")
    assert refused.code == 1
    assert (
        "4 processes without a password for etcd would be locked out: agent of node mac-1, gateway g1, "
        "reconciler host/1 1, reconciler host/2 1. Restart each with --etcd-password-file FILE"
    ) in refused.err
    anonymous = connect(etcd.address)
    assert await anonymous.get(keys.node_lease_key("mac-1")) is not None
    # A process whose lease cannot be read.
    await register(etcd, with_passwords=True)
    await anonymous.commit([], [Put(key=f"{keys.GATEWAY_LEASE_PREFIX}g9", value=b"{}")])
    await anonymous.close()
    assert "1 process without" in (await step(etcd, out, "--enable")).err
    forced = await step(etcd, out, "--enable", "--force")
    assert forced.code == 0
    assert "warning: gateway g9 is locked out until" in forced.out
    async with as_root(etcd, out) as root:
        assert await root.is_on()


def contents(out: Path) -> dict[str, tuple[str, int]]:
    return {file.name: (file.read_text(), file.stat().st_mtime_ns) for file in out.glob("*.env*")}


@pytest.mark.etcd
async def test_roles_that_were_changed_converge(etcd: TcpEtcd, out: Path) -> None:
    await run_init_auth(request(etcd, out, "mac-1"))
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
    said = await run_init_auth(request(etcd, out))
    assert "role fleet-admin revoked" in said
    assert "fleet-admin: unchanged" in said
    await check_accounts(etcd, out, "mac-1")


@pytest.mark.etcd
async def test_it_needs_roots_password_once_passwords_are_enforced(
    etcd: TcpEtcd, out: Path
) -> None:
    await run_init_auth(request(etcd, out, "mac-1"))
    other, wrong = out.with_name("other"), out.with_name("wrong")
    said = await refusal(request(etcd, other))
    assert "already enforces passwords" in said
    assert "--etcd-password-file" in said
    said = await refusal(request(etcd, other, root=out / "admin.env"))
    assert "permission denied" in said
    wrong.touch(mode=0o600)
    wrong.write_text("x\n")
    assert "refuses user root" in await refusal(request(etcd, other, root=wrong))
    # Add a node without the folder: existing passwords stay.
    said = await run_init_auth(request(etcd, other, "mac-2", root=out / "root.env"))
    assert f"fleet-node-mac-2: {NODE_PERMISSIONS} permissions granted, user added" in said
    assert [file.name for file in other.glob("*.env")] == ["node-mac-2.env"]
    (other / "node-mac-2.env").rename(out / "node-mac-2.env")
    await check_accounts(etcd, out, "mac-1", "mac-2")


@pytest.mark.etcd
async def test_new_passwords(etcd: TcpEtcd, out: Path) -> None:
    await run_init_auth(request(etcd, out, "mac-1"))
    old = contents(out)
    agent = etcd_users.read_credentials(out / "node-mac-1.env")
    transport = connect(replace(etcd.address, username=agent.user, password=agent.password))
    await transport.get(keys.node_lease_key("mac-1"))
    rotated = frozenset({"fleet-node-mac-1", "root"})
    said = await run_init_auth(replace(request(etcd, out), rotated=rotated))
    assert "fleet-gateway: unchanged" in said
    await check_accounts(etcd, out, "mac-1")
    new = contents(out)
    assert {name for name in old if old[name] != new[name]} == {"node-mac-1.env", "root.env"}
    # The old password and its token end at once.
    with pytest.raises(PermissionDeniedError):
        await transport.get(keys.node_lease_key("mac-1"))
    await transport.close()
    said = await refusal(replace(request(etcd, out), rotated=frozenset({"gateway"})))
    assert "no such user. Known users: root, fleet-admin" in said


@pytest.mark.etcd
async def test_a_password_that_was_changed_elsewhere_is_not_reset(etcd: TcpEtcd, out: Path) -> None:
    await run_init_auth(request(etcd, out))
    async with as_root(etcd, out) as root:
        await root.set_password("fleet-gateway", "theirs")
        assert "gateway.env is no longer valid for fleet-gateway" in await run_init_auth(
            request(etcd, out)
        )
        assert await root.is_password("fleet-gateway", "theirs")
    await run_init_auth(replace(request(etcd, out), rotated=frozenset({"fleet-gateway"})))
    await check_accounts(etcd, out)


@pytest.mark.etcd
async def test_two_fleets_in_one_etcd(etcd: TcpEtcd, out: Path) -> None:
    await run_init_auth(request(etcd, out, "mac-1"))
    lab = out.with_name("lab")
    words = ("--node", "mac-1", "--etcd-prefix", "/lab", "--etcd", etcd.url, "--out", str(lab))
    root_file = ("--etcd-password-file", str(out / "root.env"))
    ran = await fleetctl("init-auth", "--prepare", *words, *root_file)
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


def test_only_one_run_uses_the_folder(out: Path) -> None:
    with PasswordFolder(out).lock():
        said = refused("--etcd", "http://127.0.0.1:1", "--out", str(out))
    assert "another `fleetctl init-auth`" in said


def refused(*words: str) -> str:
    ran = CliRunner().invoke(main, ["init-auth", *words], prog_name="fleetctl")
    assert ran.exit_code in (1, 2), ran.output
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
    return " ".join(ran.output.split())


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    assert f"chmod 700 {tmp_path}" in refused(
        "--etcd", "http://127.0.0.1:1", "--out", str(tmp_path)
    )
