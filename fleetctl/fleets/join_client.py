"""The client of a join port: verifies the fleet first, and sends a secret only to a server that the fleet has certified.

The first connection trusts nothing and asks for the authorities, whose hash is in the token. It is closed. The second one
is verified with that authority alone: chain, fleet and role. Redirects are never followed, and plain HTTP is never spoken.
"""

import contextlib
import hmac
import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

import aiohttp
from pydantic import ValidationError

from fleetctl.cli.errors import FleetctlError
from identity.authority import AuthorityError, fleet_of, load_authorities, pem_of, spki_hash
from identity.credentials import Credentials
from identity.names import IdentityError, Role, parse_identity
from identity.peers import PeerVerifier, Trust, install
from identity.proof import make_proof, poll_text
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.control_characters import make_printable
from machinery.http_body import read_limited
from machinery.http_date import seconds_ahead
from schemas.meta import ApiModel
from schemas.wire.join import (
    CA_PATH,
    DEFAULT_PORT,
    JOIN_PATH,
    MAX_ANSWER_BYTES,
    MAX_CLOCK_OFFSET_S,
    POLL_S,
    REJOIN_PATH,
    REQUESTS_PATH,
    AuthorityAnswer,
    JoinAnswer,
    JoinBody,
    JoinRefusal,
    PendingAnswer,
    PendingBody,
    RejoinBody,
)

M = TypeVar("M", bound=ApiModel)

_BACKOFF: Final = Backoff(first_s=0.5, limit_s=15.0)
_CALL_S: Final = 20.0
_CONNECT_S: Final = 10.0
_MAX_WAIT_S: Final = 60.0
_AGAIN: Final = (429, 503)


class UnreachableError(FleetctlError):
    """A join port does not answer; another one may."""


class NoJoinPortError(UnreachableError):
    """A server is no join port: it does not speak TLS, or demands a certificate. Another try changes nothing."""


class BusyError(FleetctlError):
    """A join port asks to try again; `after_s` is the time that it asks for, 0 for none."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class JoinAddress:
    """Host and port of a join port."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The base of its URLs; always https."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"


def parse_addresses(text: str) -> tuple[JoinAddress, ...]:
    """Return the addresses in `HOST:PORT[,HOST:PORT]`; the port may be left out. Raises FleetctlError."""
    return tuple(_parse_address(part.strip()) for part in text.split(",") if part.strip())


def _parse_address(text: str) -> JoinAddress:
    wrong = FleetctlError(
        f"{text[:100]!r} is not the address of a join port: write HOST:PORT, as in control-1:{DEFAULT_PORT}"
    )
    if "/" in text or "@" in text:
        raise wrong  # a URL: fleetctl speaks TLS whatever it says
    host, colon, port = text.rpartition(":")
    if (text.startswith("[") and text.endswith("]")) or not colon:
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port[:6]) < 65536:
        raise wrong
    return JoinAddress(host, int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedServer:
    """A join port, and the trust with which it is dialled."""

    address: JoinAddress
    context: ssl.SSLContext
    server_name: str | None
    """The DNS name that its certificate must have; None for a server that is not verified."""
    authority_hash: bytes = b""
    """SHA-256 of the public key of the fleet's authority."""


async def pin(address: JoinAddress, expected: bytes | None, clock: Clock) -> PinnedServer:
    """Return the server with trust in the authority that has the expected hash; without one, in the first that it shows.

    Raises:
        UnreachableError: it does not answer, or not over TLS.
        FleetctlError: no authority has the hash, the answer is not one of a join port, or the clocks are too far apart
            for certificates.

    """
    untrusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    untrusted.check_hostname = False
    untrusted.verify_mode = ssl.CERT_NONE
    stranger = PinnedServer(address=address, context=untrusted, server_name=None)
    sent = await _send(stranger, "GET", CA_PATH)
    answer = parse_answer(AuthorityAnswer, sent.content)
    try:
        shown = load_authorities(answer.authorities)
        hashes = [spki_hash(certificate.public_key()) for certificate in shown]
    except (AuthorityError, AssertionError) as error:
        raise FleetctlError(f"{address.url} shows no authority of a fleet: {error}") from error
    index = 0 if expected is None else _find(hashes, expected, address)
    _check_clock(sent.date, address, clock)
    authority = shown[index]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=pem_of(authority))
    try:
        fleet, identity = fleet_of(authority), parse_identity(answer.identity)
    except (AuthorityError, IdentityError) as error:
        raise FleetctlError(f"{address.url} is no join port: {error}") from error
    install(
        context,
        PeerVerifier(
            trust=lambda: Trust(fleet=fleet), clock=clock, roles=frozenset({Role.RECONCILER})
        ),
    )
    # What it says of itself counts only together with the chain, the fleet and the role.
    return PinnedServer(
        address=address,
        context=context,
        server_name=identity.dns_name,
        authority_hash=hashes[index],
    )


async def prove(address: JoinAddress, expected: bytes | None, clock: Clock) -> bytes:
    """Return the hash of the authority that has certified the server at an address, which was only suggested.

    Raises:
        FleetctlError: as `pin`; or it holds no certificate of the authority that it shows.

    """
    server = await pin(address, expected, clock)
    await send(server, "GET", CA_PATH)
    return server.authority_hash


def _find(hashes: list[bytes], expected: bytes, address: JoinAddress) -> int:
    matches = [hmac.compare_digest(digest, expected) for digest in hashes]
    if not any(matches):
        raise FleetctlError(
            f"{address.url} is not a server of the fleet that made this token. Somebody may sit between this machine and "
            "the fleet; or the address is of another fleet, or its authority was replaced since.\n"
            f"  the token expects SHA-256 {expected.hex()}\n"
            f"  the server shows  SHA-256 {hashes[0].hex()}\n"
            "The token's secret was not sent. Check the address; then create another token"
        )
    return matches.index(True)


def _check_clock(date: str, address: JoinAddress, clock: Clock) -> None:
    """Raise FleetctlError if this machine would take the fleet's certificates for expired, or for not yet valid."""
    ahead_s = seconds_ahead(date, clock.now())
    if ahead_s is None or abs(ahead_s) <= MAX_CLOCK_OFFSET_S:
        return
    raise FleetctlError(
        f"the clock of this machine is {abs(ahead_s):.0f} s {'behind' if ahead_s > 0 else 'ahead of'} the clock of "
        f"{address.host}; certificates need clocks that are at most {MAX_CLOCK_OFFSET_S:.0f} s apart. Set the clock that "
        "is wrong (`sudo sntp -sS time.apple.com` on a Mac), and run the command again. No secret was sent"
    )


async def send(
    server: PinnedServer,
    method: str,
    path: str,
    document: ApiModel | None = None,
    headers: dict[str, str] | None = None,
) -> bytes:
    """Return the body of a successful answer, over a connection of its own.

    Raises:
        UnreachableError: the server does not answer, or not over TLS.
        BusyError: it asks to try again.
        FleetctlError: it is not verified, or refuses.

    """
    return (await _send(server, method, path, document, headers)).content


@dataclass(frozen=True, slots=True)
class _Answer:
    """A successful answer: its body and its Date header."""

    content: bytes
    date: str


async def _send(
    server: PinnedServer,
    method: str,
    path: str,
    document: ApiModel | None = None,
    headers: dict[str, str] | None = None,
) -> _Answer:
    """Return a successful answer; see `send`."""
    where = server.address.url
    body = None if document is None else document.model_dump_json(by_alias=True).encode()
    timeout = aiohttp.ClientTimeout(total=_CALL_S, connect=_CONNECT_S)
    connector = aiohttp.TCPConnector(force_close=True, limit=1)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(
                method,
                where + path,
                data=body,
                headers={"content-type": "application/json", **(headers or {})},
                ssl=server.context,
                server_hostname=server.server_name,
                allow_redirects=False,
            ) as answered,
        ):
            content = await read_limited(answered.content.iter_any(), MAX_ANSWER_BYTES)
            status, after = answered.status, answered.headers.get("retry-after", "")
            date = answered.headers.get("date", "")
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        raise FleetctlError(
            f"{where} did not prove that it belongs to the fleet ({why}). Somebody may sit between this machine and the "
            "fleet; or its authority was exchanged since the token was made, and another token is needed. The token's "
            "secret was not sent"
        ) from error
    except aiohttp.ClientConnectorSSLError as error:
        if "ALERT" in str(error):  # the other side has refused us, before or after the handshake
            raise _ended(where, error) from error
        raise NoJoinPortError(
            f"{where} does not speak TLS as a join port does, and fleetctl sends nothing without it ({_reason(error)}). "
            "Reconcilers have the join port, 4002 by default"
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if _is_tls(error):
            raise _ended(where, error) from error
        raise UnreachableError(f"{where} does not answer ({_reason(error)})") from error
    if status == 200:
        return _Answer(content, date)
    refusal = _refusal(content, where, status)
    if status in _AGAIN:
        wait_s = min(float(after), _MAX_WAIT_S) if after.isdecimal() else 0.0
        raise BusyError(refusal, wait_s)
    raise FleetctlError(refusal)


def _ended(where: str, error: BaseException) -> NoJoinPortError:
    return NoJoinPortError(
        f"{where} ended the connection ({_reason(error)}), as etcd does without a certificate. Reconcilers have the join "
        "port, 4002 by default"
    )


def _is_tls(error: BaseException) -> bool:
    """Return whether TLS failed: aiohttp wraps its error, also one that comes after the handshake."""
    layers = (error, getattr(error, "os_error", None), error.__cause__)
    return any(isinstance(layer, ssl.SSLError) for layer in layers)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_CALL_S:g} s"
    found = getattr(error, "os_error", error)
    if isinstance(found, OSError) and (found.errno or 0) > 0 and not _is_tls(error):
        return os.strerror(
            found.errno or 0
        ).lower()  # strerror has the address, which the message has, too
    return str(getattr(found, "strerror", None) or found)[:200]


def _failure(failures: Sequence[FleetctlError]) -> FleetctlError:
    """Return the error of a try at all addresses, and what may be missing where one of them is silent."""
    said = "; ".join(map(str, failures))
    if any(type(failure) is UnreachableError for failure in failures):
        said += (
            ". On the fleet's side `fleetctl up --join ADDRESS`, or a reconciler with --authority-dir, opens the join "
            "port; a firewall may close it"
        )
    return FleetctlError(said)


def _refusal(content: bytes, where: str, status: int) -> str:
    """Return the server's sentence, or one about a server that is no join port."""
    try:
        return make_printable(JoinRefusal.model_validate_json(content).message)
    except ValidationError:
        return (
            f"{where} is no join port: it answered with status {status}. Give the address of a reconciler with "
            "--authority-dir"
        )


def parse_answer(model: type[M], content: bytes) -> M:
    """Return the document in an answer. Raises FleetctlError."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise FleetctlError(
            f"the answer cannot be read ({where}: {first['msg']}); is fleetctl of the fleet's release?"
        ) from error


def _ignore(_text: str) -> None:
    """Say nothing."""


async def join(
    addresses: tuple[JoinAddress, ...],
    authority_hash: bytes,
    body: JoinBody,
    clock: Clock,
    *,
    limit_s: float,
    tell: Callable[[str], None] = _ignore,
) -> JoinAnswer:
    """Return the answer of the first join port that gives one; try again while none does, up to `limit_s`.

    `tell` hears why, when that changes.

    Raises:
        FleetctlError: a server is not of the fleet, or refuses the token.

    """

    async def ask(address: JoinAddress) -> JoinAnswer:
        server = await pin(address, authority_hash, clock)
        return parse_answer(JoinAnswer, await send(server, "POST", JOIN_PATH, body))

    return await _first_answer(addresses, ask, clock, limit_s, tell)


async def rejoin(
    addresses: tuple[JoinAddress, ...],
    credentials: Credentials,
    body: RejoinBody,
    clock: Clock,
    *,
    limit_s: float,
    tell: Callable[[str], None] = _ignore,
) -> JoinAnswer:
    """Return the answer of the first join port to a machine that shows its certificate, as `join`.

    Raises:
        FleetctlError: a server is not of the machine's fleet, or refuses the certificate.

    """
    context = credentials.client(frozenset({Role.RECONCILER})).context

    async def ask(address: JoinAddress) -> JoinAnswer:
        # Only its name is taken from this connection; the next one verifies it.
        shown = await pin(address, None, clock)
        server = replace(shown, context=context)
        return parse_answer(JoinAnswer, await send(server, "POST", REJOIN_PATH, body))

    return await _first_answer(addresses, ask, clock, limit_s, tell)


async def _first_answer(
    addresses: tuple[JoinAddress, ...],
    ask: Callable[[JoinAddress], Awaitable[JoinAnswer]],
    clock: Clock,
    limit_s: float,
    tell: Callable[[str], None],
) -> JoinAnswer:
    """Return the first answer; try again with backoff while there is none, up to `limit_s`. Raises FleetctlError."""
    retries, end = Retries(_BACKOFF, clock), clock.monotonic() + limit_s
    told = ""
    while True:
        after_s = 0.0
        failures: list[FleetctlError] = []
        for address in addresses:
            try:
                return await ask(address)
            except BusyError as error:
                after_s = max(after_s, error.after_s)
                failures.append(error)
            except UnreachableError as error:
                failures.append(error)
        wait_s = max(after_s, retries.next_delay_s())
        is_final = all(isinstance(failure, NoJoinPortError) for failure in failures)
        if is_final or clock.monotonic() + wait_s >= end:
            raise _failure(failures)
        if (said := "; ".join(map(str, failures))) != told:
            tell(f"{said}; trying again for {end - clock.monotonic():.0f} s")
            told = said
        await clock.sleep(wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMachine:
    """A machine that waits for an approval: its request and its key, which was made for this attempt."""

    addresses: tuple[JoinAddress, ...]
    authority_hash: bytes
    """Of the authority that the first server has shown. Only its servers are asked from then on."""
    id: str
    key: bytes


async def ask_to_join(
    addresses: tuple[JoinAddress, ...], key: bytes, body: PendingBody, clock: Clock
) -> PendingMachine:
    """Ask the first join port that answers, and return what it needs to wait. Raises FleetctlError."""
    failures: list[FleetctlError] = []
    for address in addresses:
        try:
            # The key is sent only now that the authority is known: see identity/join_code.py.
            server = await pin(address, None, clock)
            answer = parse_answer(PendingAnswer, await send(server, "POST", REQUESTS_PATH, body))
        except (BusyError, UnreachableError) as error:
            failures.append(error)
            continue
        return PendingMachine(
            addresses=addresses, authority_hash=server.authority_hash, id=answer.id, key=key
        )
    raise _failure(failures)


async def wait_for_approval(waiting: PendingMachine, clock: Clock, *, limit_s: float) -> JoinAnswer:
    """Return the answer once an administrator has approved the request.

    Raises:
        FleetctlError: the request is denied or has ended, or no administrator has answered it in time.

    """
    retries, end = Retries(_BACKOFF, clock), clock.monotonic() + limit_s
    while clock.monotonic() < end:
        try:
            answer = await _poll(waiting, clock)
        except (BusyError, UnreachableError) as error:
            after_s = error.after_s if isinstance(error, BusyError) else 0.0
            await clock.sleep(max(after_s, retries.next_delay_s()))
            continue
        retries.reset()
        if answer.state == "Denied":
            raise FleetctlError(answer.message or "the request is denied")
        if answer.answer is not None:
            return answer.answer
        await clock.sleep(POLL_S)
    raise FleetctlError(
        f"no administrator has answered within {limit_s:g} s. Run the command again, and give its new code to one; or use "
        "a token (`fleetctl token create`)"
    )


async def _poll(
    waiting: PendingMachine, clock: Clock, method: Literal["GET", "DELETE"] = "GET"
) -> PendingAnswer:
    """Ask about the request, with a proof of its key. Raises as `send`."""
    proof = make_proof(waiting.key, poll_text(waiting.id, waiting.authority_hash))
    failures: list[UnreachableError] = []
    for address in waiting.addresses:
        try:
            server = await pin(address, waiting.authority_hash, clock)
            headers = {"authorization": f"Proof {proof}"}
            path = f"{REQUESTS_PATH}/{waiting.id}"
            return parse_answer(PendingAnswer, await send(server, method, path, None, headers))
        except UnreachableError as error:
            failures.append(error)
    raise failures[0]


async def end_request(waiting: PendingMachine, clock: Clock) -> None:
    """Delete the request; it ends by itself where that fails."""
    with contextlib.suppress(FleetctlError):
        await _poll(waiting, clock, "DELETE")
