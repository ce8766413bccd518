"""`fleetctl join`: the files of a machine that joins, and the command that is run twice or was killed."""

import shlex
import stat
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from fleetctl.fleets.join_client import JoinAddress
from fleetctl.fleets.join_files import JoinFolder, role_flags
from fleetctl.verbs.join import JoinRequest, join_with_token
from identity.authority import load_certificate, serial_text, spki_hash
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.join_token import JoinToken
from identity.names import Role
from identity.token_store import TokenOptions, list_tokens
from machinery.clock import SystemClock
from schemas.trust import TlsMode
from tests.support.fleet import Done
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.identities import TestAuthority, now
from tests.support.join import JoinStand, machine
from tests.support.ports import free_port

GATEWAY = TokenOptions(role="gateway", name="edge-1", labels={})


@dataclass
class Serving:
    """A join port, and fleetctl on a machine that joins through it."""

    stand: JoinStand
    address: JoinAddress
    folder: Path

    async def join(self, *words: str, stdin: bytes = b"") -> Done:
        where = f"127.0.0.1:{self.address.port}"
        words = ("join", *words, where, "--identity-dir", str(self.folder), "--timeout=1")
        return await run_fleetctl(*words, stdin=stdin)

    def request(self, token: JoinToken) -> JoinRequest:
        """Return the request of a node, whatever this machine is."""
        return JoinRequest(
            token=token,
            addresses=(self.address,),
            folder=JoinFolder(IdentityFolder(self.folder)),
            machine=machine("mac-1"),
            limit_s=1.0,
        )


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    stand = await JoinStand(tmp_path / "fleet").open()
    async with stand.serve() as address:
        yield Serving(stand, address, tmp_path / "mine" / "identity")


async def test_join_writes_an_identity_that_works(serving: Serving) -> None:
    token = await serving.stand.token(GATEWAY)
    done = await serving.join(token.render())
    assert done.code == 0, done.err
    assert "gateway/edge-1 joined the fleet" in done.out
    assert "start it with: fleet-gateway --identity-dir" in done.out
    assert "--etcd https://127.0.0.1:2379" in done.out
    credentials = Credentials(IdentityFolder(serving.folder), SystemClock())
    assert credentials.identity == serving.stand.ca.identity(Role.GATEWAY, "edge-1")
    assert credentials.mode is TlsMode.STRICT
    assert stat.S_IMODE(serving.folder.stat().st_mode) == 0o700
    files = {path.name: path for path in serving.folder.iterdir() if path.name[0] != "."}
    assert set(files) == {"identity.pem", "ca.pem", "trust.json", "fleet.env"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    variables = dict(line.split("=", 1) for line in files["fleet.env"].read_text().splitlines()[1:])
    assert shlex.split(variables["FLEET_IDENTITY_DIR"]) == [str(serving.folder)]
    assert token.secret_text not in done.out + done.err


async def test_a_node_gets_the_flags_of_its_agent(serving: Serving) -> None:
    identity, variables = await join_with_token(serving.request(await serving.stand.token()))
    assert identity.role is Role.NODE
    assert variables["FLEET_NODE_NAME"] == "mac-1"
    assert variables["FLEET_NODE_ADDRESS"] == "10.0.0.7"
    assert variables["FLEET_STATE_DIR"] == str(serving.folder.parent / "agent")
    # A killed `join --service` continues with them.
    assert JoinFolder(IdentityFolder(serving.folder)).read_variables() == variables
    assert role_flags(identity.role, variables)[:4] == [
        *("--identity-dir", str(serving.folder)),
        *("--etcd", "https://127.0.0.1:2379"),
    ]


async def test_an_administrator_gets_commands_for_all_of_fleetctl(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files of etcd alone, verbs that dial agents and gateways would have no identity."""
    monkeypatch.setenv("FLEETCTL_CONFIG", str(tmp_path / "config.toml"))
    token = await serving.stand.token(TokenOptions(role="admin", name="me", labels={}))
    done = await serving.join(token.render())
    assert done.code == 0, done.err
    line = next(one for one in done.out.splitlines() if "use it with: " in one)
    for command in line.partition("use it with: ")[2].split(" && "):
        program, *words = shlex.split(command)
        assert program == "fleetctl"
        done = await run_fleetctl(*words)
        assert done.code == 0, done.err
    written = tomllib.loads((tmp_path / "config.toml").read_text())
    context = written["contexts"][written["current-context"]]
    assert context["identity-dir"] == str(serving.folder)
    assert context["etcd"] == ["https://127.0.0.1:2379"]


@pytest.mark.parametrize("way", ["-", "--token-file"])
async def test_the_token_is_read_from_where_ps_does_not_show_it(
    serving: Serving, way: str, tmp_path: Path
) -> None:
    text = (await serving.stand.token(GATEWAY)).render() + "\n"
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    words, stdin = ((way,), text.encode()) if way == "-" else ((f"{way}={file}",), b"")
    done = await serving.join(*words, stdin=stdin)
    assert done.code == 0, done.err


async def test_without_an_address_the_fleet_of_the_token_is_found_by_a_seed(
    serving: Serving, tmp_path: Path
) -> None:
    seeds = tmp_path / "seeds.yaml"
    seeds.write_text(f"seeds: [127.0.0.1:{free_port()}, 127.0.0.1:{serving.address.port}]\n")
    words = ("--identity-dir", str(serving.folder), "--source=seeds", f"--seeds={seeds}")
    token = (await serving.stand.token(GATEWAY)).render()
    done = await run_fleetctl("join", token, *words)
    assert done.code == 0, done.err
    assert "gateway/edge-1 joined the fleet" in done.out
    assert (
        f"found the fleet {serving.stand.ca.authority.spki_hash.hex()[:12]} at 127.0.0.1:"
        in done.err
    )


async def test_a_second_run_says_so_and_asks_nobody(serving: Serving) -> None:
    token = await serving.stand.token(TokenOptions(role="gateway", uses=2, labels={}))
    await serving.join(token.render(), "--name=edge-1")
    before = (serving.folder / "identity.pem").read_bytes()
    again = await serving.join(token.render(), "--name=edge-1")
    assert (again.code, again.err) == (0, "")
    assert "this machine is gateway/edge-1 already, until" in again.out
    assert (serving.folder / "identity.pem").read_bytes() == before
    [record] = await list_tokens(serving.stand.transport)
    assert record.uses_left == 1


async def test_a_revoked_machine_joins_again_with_a_new_key(serving: Serving) -> None:
    token = await serving.stand.token(TokenOptions(role="gateway", uses=4, labels={}))
    await serving.join(token.render(), "--name=edge-1")
    folder = IdentityFolder(serving.folder)
    first = load_certificate(folder.certificate())
    refused = await serving.join(token.render(), "--name=edge-1", "--force")
    assert refused.code == 1
    assert "`fleetctl token create --role gateway --node edge-1`" in refused.err
    named = await serving.stand.token(
        TokenOptions(role="gateway", name="edge-1", uses=2, labels={}), bytes(21)
    )
    forced = await serving.join(named.render(), "--force")
    assert forced.code == 0, forced.err
    second = load_certificate(folder.certificate())
    assert spki_hash(second.public_key()) != spki_hash(first.public_key())
    trust = folder.read_trust()
    assert trust is not None
    folder.write_trust(trust.model_copy(update={"revoked": (serial_text(second),)}))
    again = await serving.join(named.render())
    assert again.code == 0, again.err
    assert "is revoked: joining with a new key" in again.err
    third = load_certificate(folder.certificate())
    assert spki_hash(third.public_key()) != spki_hash(second.public_key())


async def test_a_machine_with_a_certificate_joins_again_without_a_token(serving: Serving) -> None:
    await serving.join((await serving.stand.token(GATEWAY)).render())
    folder = IdentityFolder(serving.folder)
    first = load_certificate(folder.certificate())
    serving.stand.admission = replace(serving.stand.admission, etcd=("https://moved:2379",))
    again = await serving.join()
    assert again.code == 0, again.err
    assert "gateway/edge-1 joined again with its certificate" in again.out
    second = load_certificate(folder.certificate())
    assert spki_hash(second.public_key()) != spki_hash(first.public_key())
    assert ("Rejoined", "joined again with its certificate: address 127.0.0.1") in [
        (reason, message.partition(",")[0]) for reason, message in await serving.stand.events()
    ]


async def test_a_certificate_of_another_fleet_joins_nothing(
    serving: Serving, tmp_path: Path
) -> None:
    await serving.join((await serving.stand.token(GATEWAY)).render())
    before = (serving.folder / "identity.pem").read_bytes()
    other = await JoinStand(tmp_path / "other").open()
    async with other.serve() as address:
        done = await run_fleetctl(
            *("join", f"127.0.0.1:{address.port}", "--identity-dir", str(serving.folder)),
            "--timeout=1",
        )
    assert done.code == 1
    assert "did not prove that it belongs to the fleet" in done.err
    assert (serving.folder / "identity.pem").read_bytes() == before


async def test_a_run_after_a_kill_uses_the_same_key_and_no_second_use(serving: Serving) -> None:
    """At its worst a kill comes after the fleet has answered and before anything was written."""
    token = await serving.stand.token()
    request = serving.request(token)
    with request.folder.lock():
        key, _ = request.folder.load_key()
    await join_with_token(request)
    for name in ("identity.pem", "ca.pem", "trust.json", "fleet.env"):
        (serving.folder / name).unlink()
    request.folder.key.write_bytes(key)
    request.folder.key.chmod(0o600)
    identity, _ = await join_with_token(request)
    assert identity.name == "mac-1"
    assert Credentials(request.folder.identity, SystemClock()).identity == identity
    assert not request.folder.key.exists()
    [record] = await list_tokens(serving.stand.transport)
    assert len(record.uses) == 1


FILES = ("fleet.env", "ca.pem", "trust.json", "identity.pem")


@pytest.mark.parametrize("written", range(len(FILES) + 1))
async def test_a_kill_between_two_files_leaves_nothing_half_used(
    serving: Serving, written: int
) -> None:
    token = await serving.stand.token(GATEWAY)
    folder = JoinFolder(IdentityFolder(serving.folder))
    key, _ = folder.load_key()
    await serving.join(token.render())
    for name in FILES[written:]:
        (serving.folder / name).unlink()
    folder.key.write_bytes(key)
    folder.key.chmod(0o600)
    assert folder.identity.is_issued == (written == len(FILES))
    done = await serving.join(token.render())
    assert done.code == 0, done.err
    assert Credentials(folder.identity, SystemClock()).identity.name == "edge-1"
    assert not folder.key.exists()
    [record] = await list_tokens(serving.stand.transport)
    assert len(record.uses) == 1


async def test_an_identity_of_another_fleet_is_kept(serving: Serving, tmp_path: Path) -> None:
    token = await serving.stand.token(GATEWAY)
    await serving.join(token.render())
    other = await JoinStand(tmp_path / "other").open()
    refused = await serving.join((await other.token()).render())
    assert refused.code == 1
    assert "of another fleet than the token's" in refused.err


async def test_an_expired_identity_is_replaced(serving: Serving) -> None:
    old = TestAuthority(serving.folder.parent, serving.stand.ca.authority)
    expired = old.issue(Role.GATEWAY, "edge-1", start=now() - timedelta(days=60))
    expired.path.rename(serving.folder)
    done = await serving.join((await serving.stand.token(GATEWAY)).render())
    assert done.code == 0, done.err
    assert "joined the fleet" in done.out


async def test_a_folder_that_others_may_read_is_refused(serving: Serving) -> None:
    serving.folder.mkdir(parents=True, mode=0o755)
    serving.folder.chmod(0o755)
    refused = await serving.join((await serving.stand.token(GATEWAY)).render())
    assert refused.code == 1
    assert "chmod 700" in refused.err
