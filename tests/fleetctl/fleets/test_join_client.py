"""The client of a join port on real sockets: every stand-in for the fleet records what it gets, and never gets the secret."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from typing_extensions import override

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import join_client
from fleetctl.fleets.join_client import JoinAddress, parse_addresses
from identity.authority import Authority, identity_of, load_certificate
from identity.folder import IdentityFolder
from identity.join_token import JoinToken
from identity.names import Role
from machinery.clock import SystemClock
from schemas.wire.join import CA_PATH, JoinAnswer, JoinBody
from tests.support.identities import TestAuthority, now
from tests.support.join import JoinStand, join_body, machine
from tests.support.ports import free_port
from tests.support.store_tls import running_tls_etcd
from tests.support.tcp_server import tcp_server

CLOCK = SystemClock()
NOT_SENT = "The token's secret was not sent"


@pytest.fixture
async def stand(tmp_path: Path) -> JoinStand:
    return await JoinStand(tmp_path / "fleet").open()


class WrongClock(SystemClock):
    """The clock of a machine that has the wrong time."""

    def __init__(self, offset_s: float) -> None:
        self._offset = timedelta(seconds=offset_s)

    @override
    def now(self) -> datetime:
        return super().now() + self._offset


class StandIn:
    """A server in the place of the fleet: it answers every request, and keeps every byte that it can read."""

    def __init__(
        self, context: ssl.SSLContext | None, answer: Callable[[str], bytes] = lambda _: b""
    ) -> None:
        self.received = b""
        self.connections = 0
        self._context = context
        self._answer = answer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        head = b""
        if self._context is None:
            writer.write(self._answer(CA_PATH))  # it does not wait for a request that it can read
        while (
            self._context is not None
            and not head.endswith(b"\r\n\r\n")
            and (byte := await reader.read(1))
        ):
            head += byte
            self.received += byte
        path = head.split(b" ")[1].decode() if head.count(b" ") > 1 else ""
        if path:
            writer.write(self._answer(path))
        while more := await reader.read(1 << 16):
            self.received += more

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[JoinAddress]:
        async with tcp_server(self.handle, context=self._context) as port:
            yield JoinAddress("127.0.0.1", port)


def http(document: object, status: str = "200 OK", more: str = "") -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{more}\r\n"
    return head.encode() + body


def shown(authorities: str, identity: str) -> Callable[[str], bytes]:
    """Return an answer to every path with these authorities."""
    return lambda _: http({"authorities": authorities, "identity": identity})


def tls_of(folder: IdentityFolder) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder.identity)
    return context


async def attempt(
    token: JoinToken, *where: JoinAddress, body: JoinBody | None = None
) -> JoinAnswer:
    body = body or join_body(token)
    return await join_client.join(where, token.authority_hash, body, CLOCK, limit_s=0.1)


def is_silent(stand_in: StandIn, token: JoinToken) -> bool:
    """Return whether the stand-in has seen neither the secret, nor the id, nor a request for a certificate."""
    seen = stand_in.received
    return not any(
        part in seen for part in (token.secret_text.encode(), token.id.encode(), b"CERTIFICATE")
    )


async def test_a_machine_joins_over_a_verified_connection(stand: JoinStand) -> None:
    token = await stand.token()
    async with stand.serve() as where:
        answer = await attempt(token, where, body=join_body(token, who=machine("mac-1")))
    assert identity_of(load_certificate(answer.certificate)).name == "mac-1"


@pytest.mark.parametrize(("offset_s", "words"), [(300, "ahead of"), (-300, "behind")])
async def test_a_machine_whose_clock_is_wrong_is_told_so_and_sends_no_secret(
    stand: JoinStand, offset_s: int, words: str
) -> None:
    token = await stand.token()
    clock = WrongClock(offset_s)
    async with stand.serve() as where:
        with pytest.raises(
            FleetctlError, match=rf"clock of this machine is \d+ s {words}"
        ) as caught:
            await join_client.join(
                (where,), token.authority_hash, join_body(token), clock, limit_s=0.1
            )
        assert "No secret was sent" in caught.value.message
        answer = await attempt(token, where)  # the token is not used up
    assert answer.certificate


async def test_a_server_of_another_authority_gets_no_secret(
    stand: JoinStand, tmp_path: Path
) -> None:
    token, other = await stand.token(), TestAuthority(tmp_path / "other")
    folder = other.issue(Role.RECONCILER, "control-1")
    uri = other.identity(Role.RECONCILER, "control-1").uri
    stand_in = StandIn(tls_of(folder), shown(other.authority.pem, uri))
    async with stand_in.listen() as where:
        with pytest.raises(FleetctlError, match="Somebody may sit between") as caught:
            await attempt(token, where)
    assert token.authority_hash.hex() in caught.value.message
    assert other.authority.spki_hash.hex() in caught.value.message
    assert NOT_SENT in caught.value.message
    assert stand_in.connections == 1
    assert CA_PATH.encode() in stand_in.received
    assert is_silent(stand_in, token)


async def test_an_authority_of_the_same_name_with_another_key_gets_no_secret(
    stand: JoinStand, tmp_path: Path
) -> None:
    token = await stand.token()
    forged = Authority.create(now(), stand.ca.authority.fleet)
    other = TestAuthority(tmp_path / "other", forged)
    folder = other.issue(Role.RECONCILER, "control-1")
    uri = stand.credentials.identity.uri
    both = forged.pem + stand.ca.authority.pem  # the real one is public
    for pem in (forged.pem, both):
        stand_in = StandIn(tls_of(folder), shown(pem, uri))
        async with stand_in.listen() as where:
            with pytest.raises(FleetctlError, match="Somebody may sit between"):
                await attempt(token, where)
        assert is_silent(stand_in, token)


async def test_a_proxy_that_passes_the_authorities_through_gets_no_secret(
    stand: JoinStand, tmp_path: Path
) -> None:
    """It passes the bytes of the first connection through, and answers the second one itself."""
    token, other = await stand.token(), TestAuthority(tmp_path / "other")
    folder = other.issue(Role.RECONCILER, "control-1")
    stand_in = StandIn(tls_of(folder), shown("", ""))
    async with stand.serve() as real, stand_in.listen() as own:
        targets = iter((real, own, own, own))

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            target = next(targets)
            there = await asyncio.open_connection(target.host, target.port)
            await asyncio.gather(_pipe(reader, there[1]), _pipe(there[0], writer))

        async with tcp_server(relay) as port:
            where = JoinAddress("127.0.0.1", port)
            with pytest.raises(FleetctlError, match="did not prove that it belongs") as caught:
                await attempt(token, where)
    assert NOT_SENT in caught.value.message
    assert stand_in.received == b""


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("role", [Role.NODE, Role.GATEWAY, Role.ADMIN])
async def test_another_part_of_the_same_fleet_gets_no_secret(stand: JoinStand, role: Role) -> None:
    """A stolen node's key does not make a join port, whatever it says of itself."""
    token, folder = await stand.token(), stand.ca.issue(role, "mac-1")
    for claimed in (role, Role.RECONCILER):
        uri = stand.ca.identity(claimed, "mac-1").uri
        stand_in = StandIn(tls_of(folder), shown(stand.ca.authority.pem, uri))
        async with stand_in.listen() as where:
            with pytest.raises(FleetctlError, match="did not prove"):
                await attempt(token, where)
        assert is_silent(stand_in, token)


async def test_an_expired_reconciler_gets_no_secret(stand: JoinStand) -> None:
    token = await stand.token()
    life = timedelta(seconds=1)
    folder = stand.ca.issue(Role.RECONCILER, "old", start=now() - timedelta(days=2), lifetime=life)
    uri = stand.ca.identity(Role.RECONCILER, "old").uri
    stand_in = StandIn(tls_of(folder), shown(stand.ca.authority.pem, uri))
    async with stand_in.listen() as where:
        with pytest.raises(FleetctlError, match="did not prove"):
            await attempt(token, where)
    assert is_silent(stand_in, token)


async def test_a_silent_join_port_is_named_before_the_next_try(stand: JoinStand) -> None:
    class HeardError(Exception):
        """Ends the join with what was told."""

    def tell(text: str) -> None:
        raise HeardError(text)

    token = await stand.token()
    where = JoinAddress("127.0.0.1", free_port())
    with pytest.raises(HeardError, match=r"answer \(connection refused\); trying again for \d+ s$"):
        await join_client.join(
            (where,), token.authority_hash, join_body(token), CLOCK, limit_s=600, tell=tell
        )


async def test_a_server_without_tls_gets_no_secret(stand: JoinStand) -> None:
    token = await stand.token()
    pem, uri = stand.ca.authority.pem, stand.credentials.identity.uri
    stand_in = StandIn(None, shown(pem, uri))
    async with stand_in.listen() as where:
        # At once, although it may wait: another try changes nothing.
        async with asyncio.timeout(60):
            with pytest.raises(FleetctlError, match="does not speak TLS"):
                await join_client.join(
                    (where,), token.authority_hash, join_body(token), CLOCK, limit_s=600
                )
    assert stand_in.received[:1] == b"\x16"  # the beginning of TLS, and nothing else
    assert is_silent(stand_in, token)


async def test_an_etcd_that_wants_a_certificate_is_no_join_port(
    stand: JoinStand, tmp_path: Path
) -> None:
    """Its refusal comes after the handshake, and waiting for another answer helps nobody."""
    token = await stand.token()
    async with running_tls_etcd(tmp_path) as etcd, asyncio.timeout(60):
        (where,) = parse_addresses(etcd.address.endpoints[0].removeprefix("https://"))
        with pytest.raises(FleetctlError, match=r"ended the connection .* as etcd does"):
            await join_client.join(
                (where,), token.authority_hash, join_body(token), CLOCK, limit_s=600
            )


async def test_redirects_are_not_followed(stand: JoinStand) -> None:
    """Not even those of a server of the fleet."""
    token = await stand.token()
    elsewhere = StandIn(None)
    async with elsewhere.listen() as other:
        location = f"location: http://127.0.0.1:{other.port}/v1/join\r\n"
        pem, uri = stand.ca.authority.pem, stand.credentials.identity.uri

        def answer(path: str) -> bytes:
            if path == CA_PATH:
                return shown(pem, uri)(path)
            return http({}, "307 Temporary Redirect", location)

        first = StandIn(tls_of(stand.identity), answer)
        async with first.listen() as where:
            with pytest.raises(FleetctlError, match="is no join port: it answered with status 307"):
                await attempt(token, where)
    assert elsewhere.connections == 0


async def test_another_address_is_tried_when_one_does_not_answer(stand: JoinStand) -> None:
    token = await stand.token()
    dead = JoinAddress("127.0.0.1", free_port())
    async with stand.serve() as where:
        answer = await attempt(token, dead, where)
    assert answer.fleet == stand.ca.authority.fleet


async def test_a_refusal_says_what_the_fleet_says(stand: JoinStand) -> None:
    token = await stand.token()
    async with stand.serve() as where:
        with pytest.raises(FleetctlError, match="this token is not valid"):
            await attempt(token, where, body=join_body(token, secret="a" * 26))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("control-1", [("control-1", 4002)]),
        ("control-1:4003,10.0.0.7", [("control-1", 4003), ("10.0.0.7", 4002)]),
        ("[fd00::1]:4002,[fd00::2]", [("fd00::1", 4002), ("fd00::2", 4002)]),
    ],
)
def test_addresses_are_hosts_and_ports(text: str, expected: list[tuple[str, int]]) -> None:
    assert [(address.host, address.port) for address in parse_addresses(text)] == expected
    assert all(address.url.startswith("https://") for address in parse_addresses(text))


@pytest.mark.parametrize(
    "text", ["http://control-1:4002", "control-1:0", "control-1:x", "a@b:1", ":4002", "a:70000"]
)
def test_urls_are_no_addresses(text: str) -> None:
    with pytest.raises(FleetctlError, match="write HOST:PORT"):
        parse_addresses(text)


async def test_the_port_takes_no_token_over_plain_http(stand: JoinStand) -> None:
    token = await stand.token()
    raw = join_body(token).model_dump_json(by_alias=True).encode()
    async with stand.serve() as where, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{where.port}/v1/join"
        async with session.post(url, data=raw) as answered:
            assert (answered.status, (await answered.json())["code"]) == (400, "PlainHttp")
        await attempt(token, where)  # its only use is left
