"""The join port: GET /v1/ca, POST /v1/join.

Every machine that reaches the port may ask. A request without a valid token changes nothing and learns nothing: an unknown id and
a wrong secret get the same answer after the same time. Attempts are few, and each is an event.
"""

import ipaddress
import logging
from dataclasses import replace
from typing import Final, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from identity import token_store
from identity.credentials import Credentials
from identity.folder import FolderError
from identity.names import Role
from identity.token_store import TokenRefusedError
from machinery.clock import Clock
from machinery.rate_limit import RateLimit, SourceRateLimit
from machinery.request_body import BodyReader, RequestRefusedError
from reconciler.services.join.admission import (
    Admission,
    AdmissionError,
    NameRight,
    SignerUnreadyError,
)
from schemas.event import ObjectReference
from schemas.meta import ApiModel
from schemas.trust import JoinTokenRecord, JoinTokenUse
from schemas.wire.join import (
    CA_PATH,
    JOIN_PATH,
    MAX_BODY_BYTES,
    NAME_TAKEN,
    AuthorityAnswer,
    JoinAnswer,
    JoinBody,
    JoinRefusal,
    Machine,
)
from store.errors import ConflictError, StoreError
from store.events import EventRecorder

log = logging.getLogger(__name__)
M = TypeVar("M", bound=ApiModel)

ATTEMPTS_PER_MINUTE: Final = 5
TOTAL_PER_MINUTE: Final = 20
REFUSAL_S: Final = 0.5
"""The time from a request to the refusal of its token, whatever the reason: longer than all checks take."""
_BODY_S = 10.0
_BODIES = 64
# The networks of one site: a machine has any address in its own.
_IPV6_SOURCE_BITS = 64


class RefusedError(Exception):
    """A request that is refused: status, code and message of the answer."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def source_of(request: Request) -> str:
    """Return the sender's address for limits: an IPv4 address, or an IPv6 network."""
    text = request.client.host if request.client is not None else ""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_SOURCE_BITS), strict=False))


def parse_body(model: type[M], raw: bytes) -> M:
    """Return the document in a body. Raises RefusedError, without any of its values: they may be secret."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        message = f"{where[:100]}: {first['msg'][:200]}. Is fleetctl on the joining machine of this release?"
        raise RefusedError(400, "InvalidRequest", message) from error


def respond(document: ApiModel, status: int = 200) -> Response:
    """Return the response with a document."""
    return Response(
        document.model_dump_json(by_alias=True, exclude_none=True),
        status_code=status,
        media_type="application/json",
        headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
    )


def refuse(error: RefusedError) -> Response:
    """Return the response to a refused request."""
    response = respond(JoinRefusal(code=error.code, message=str(error)[:2000]), error.status)
    if error.retry_after_s:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


class BodyLimits:
    """Reads the bodies of one kind of request, over TLS and within the limits of its sources."""

    def __init__(self, limits: SourceRateLimit) -> None:
        self._limits = limits
        self._bodies = BodyReader(limit_bytes=MAX_BODY_BYTES, limit_s=_BODY_S, at_once=_BODIES)

    async def read(self, request: Request, source: str) -> bytes:
        """Return the body. Raises RefusedError: the connection is plain, or a limit is reached."""
        if request.url.scheme != "https":
            message = "machines join over TLS only; this connection is plain HTTP"
            raise RefusedError(400, "PlainHttp", message)
        wait_s = self._limits.take(source)
        if wait_s:
            message = f"too many attempts to join; try again in {wait_s} s"
            raise RefusedError(429, "TooManyAttempts", message, retry_after_s=wait_s)
        try:
            return await self._bodies.read(request)
        except RequestRefusedError as error:
            after_s = error.retry_after_s
            raise RefusedError(
                error.status, "InvalidRequest", str(error), retry_after_s=after_s
            ) from error


class JoinPort:
    """The routes of the port, on a reconciler that has the fleet's authority."""

    def __init__(
        self,
        admission: Admission,
        credentials: Credentials,
        events: EventRecorder,
        limits: SourceRateLimit | None = None,
    ) -> None:
        self._admission = admission
        self._credentials = credentials
        self._events = events
        self._clock: Clock = admission.clock
        self._attempts = BodyLimits(
            limits
            or SourceRateLimit(
                self._clock, per_minute=ATTEMPTS_PER_MINUTE, total_per_minute=TOTAL_PER_MINUTE
            ),
        )
        # Attempts over the limit are not worth an event each: an event is a write to the store.
        self._limited_events = RateLimit(self._clock, burst=1, per_s=1 / 60)

    def routes(self) -> list[Route]:
        """Return the routes of the port's application."""
        return [
            Route(CA_PATH, self.authorities, methods=["GET"]),
            Route(JOIN_PATH, self.join, methods=["POST"]),
        ]

    async def authorities(self, _: Request) -> Response:
        """Answer with the fleet's authorities, which are public; the machine compares their hash."""
        try:
            pem = self._credentials.folder.read_authorities()
        except FolderError as error:
            log.warning("join port without authorities", extra={"why": str(error)})
            return refuse(_unready())
        uri = self._credentials.identity.uri
        return respond(AuthorityAnswer(authorities=pem, identity=uri))

    async def join(self, request: Request) -> Response:
        """Answer a machine with a token."""
        end = self._clock.monotonic() + REFUSAL_S
        source = source_of(request)
        try:
            return respond(await self._join(request, source))
        except RefusedError as error:
            if error.status == 403:
                await self._clock.sleep(max(0.0, end - self._clock.monotonic()))
            return refuse(error)

    async def _join(self, request: Request, source: str) -> JoinAnswer:
        body = parse_body(JoinBody, await self._read(request, source))
        token = ObjectReference(kind="JoinToken", name=body.id)
        sender = f"address {source}"
        try:
            answer, name, role = await self._use_token(body)
        except RefusedError as error:
            why = "the token is not valid" if error.code == "InvalidToken" else str(error)
            reason = NAME_TAKEN if error.code == NAME_TAKEN else "JoinRefused"
            await self._events.record(token, reason, f"{sender}: {why}", type_="Warning")
            raise
        about = ObjectReference(kind=role.capitalize(), name=name)
        await self._events.record(about, "Joined", f"joined with token {body.id}: {sender}")
        return answer

    async def _use_token(self, body: JoinBody) -> tuple[JoinAnswer, str, Role]:
        """Return the answer to a machine, its name and its role. Raises RefusedError."""
        admission = self._admission
        store, clock = admission.transport, admission.clock
        try:
            record, item = await token_store.check_token(store, clock, body.id, body.secret)
            name = choose_name(record, body.machine)
            right = NameRight.NEW if record.name is None else NameRight.ANY
            role = Role(record.role)
            applicant = admission.applicant(role, name, body.machine, body.request, right)
            use = JoinTokenUse(key_hash=applicant.key_hash, name=name)
            if use in record.uses:
                right = NameRight.OWN_KEY if right is NameRight.NEW else right
                applicant = replace(applicant, right=right, repeats_since=item.create_revision)
            trust = await admission.trust()
            await admission.check(applicant, trust)
            grant = await token_store.use_token(store, clock, body.id, body.secret, use)
            answer = await admission.admit(
                applicant, trust, labels=grant.token.labels, guards=[grant.guard]
            )
        except TokenRefusedError as error:
            code = "TokenEnded" if error.is_known else "InvalidToken"
            raise RefusedError(403, code, str(error)) from error
        except (AdmissionError, SignerUnreadyError, StoreError) as error:
            raise refusal_of(error) from error
        return answer, name, role

    async def _read(self, request: Request, source: str) -> bytes:
        """Return the body of an attempt; one event a minute tells of attempts over the limit."""
        try:
            return await self._attempts.read(request, source)
        except RefusedError as error:
            if error.status == 429 and self._limited_events.take():
                about = ObjectReference(kind="JoinToken", name="unknown")
                message = f"address {source}: too many attempts; further ones are not recorded for a minute"
                await self._events.record(about, "JoinRefused", message, type_="Warning")
            raise


def choose_name(token: JoinTokenRecord, machine: Machine) -> str:
    """Return the name that a machine gets. Raises AdmissionError: the token is for another name."""
    if token.name is not None and machine.name not in (None, token.name):
        raise AdmissionError(
            "WrongName",
            f"this token is for the name {token.name}, not {machine.name}; leave --name out, or create a token with "
            f"`fleetctl token create --node {machine.name}`",
        )
    return token.name or machine.name or machine.default_name


def refusal_of(error: AdmissionError | SignerUnreadyError | StoreError) -> RefusedError:
    """Return the answer to a machine that was not admitted; what is wrong here goes to the log."""
    if isinstance(error, AdmissionError):
        return RefusedError(409, error.code, str(error))
    if isinstance(error, ConflictError):
        message = "another machine joined under this name at the same time; try again"
        return RefusedError(503, "Conflict", message, retry_after_s=1)
    log.warning("join port cannot answer", extra={"why": str(error)})
    return _unready()


def _unready() -> RefusedError:
    return RefusedError(
        503,
        "Unready",
        "this reconciler cannot let machines join now; its log says why. Try again, or another reconciler",
        retry_after_s=5,
    )
