"""A machine of the fleet joins again: POST /v1/rejoin, over a connection with its certificate.

It gets what a machine with a token gets: a certificate, the store's addresses, and a new password. So machines come back to a
store that was restored elsewhere, whose users are new, without a person at each of them.
"""

from typing import Final, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from identity.peers import Peer, peer_of
from machinery.http_server import SSL_OBJECT
from machinery.rate_limit import SourceRateLimit
from reconciler.join.admission import Admission, AdmissionError, SignerUnreadyError
from reconciler.join.port import (
    BodyLimits,
    RefusedError,
    parse_body,
    refusal_of,
    refuse,
    respond,
    source_of,
)
from schemas.event import ObjectReference
from schemas.trust import JoinRole
from schemas.wire.join import REJOIN_PATH, JoinAnswer, RejoinBody
from store.errors import StoreError
from store.events import EventRecorder

# Each is a new password in etcd, which takes it 0.1 s of CPU (bcrypt).
PER_MINUTE: Final = 5
_ROLES: Final = frozenset(get_args(JoinRole))
_TOTAL_PER_MINUTE = 120


class RejoinPort:
    """The route for machines that have a certificate."""

    def __init__(
        self, admission: Admission, events: EventRecorder, *, per_minute: int = PER_MINUTE
    ) -> None:
        self._admission = admission
        self._events = events
        limits = SourceRateLimit(
            admission.clock,
            per_minute=per_minute,
            total_per_minute=max(per_minute, _TOTAL_PER_MINUTE),
        )
        self._bodies = BodyLimits(limits)

    def routes(self) -> list[Route]:
        """Return the route of the port's application."""
        return [Route(REJOIN_PATH, self.rejoin, methods=["POST"])]

    async def rejoin(self, request: Request) -> Response:
        """Answer a machine with a certificate of the fleet."""
        try:
            return respond(await self._rejoin(request))
        except RefusedError as error:
            return refuse(error)

    async def _rejoin(self, request: Request) -> JoinAnswer:
        source = source_of(request)
        raw = await self._bodies.read(request, source)
        identity = _peer(request).identity
        if identity.role not in _ROLES:
            message = (
                f"a {identity.role} does not join; it has its credentials from the control Mac"
            )
            raise RefusedError(403, "WrongRole", message)
        body, admission = parse_body(RejoinBody, raw), self._admission
        try:
            trust = await admission.trust()
            applicant = admission.applicant(
                identity.role, identity.name, body.machine, body.request
            )
            await admission.check(applicant, trust)
            answer = await admission.admit(applicant, trust, labels={})
        except (AdmissionError, SignerUnreadyError, StoreError) as error:
            raise refusal_of(error) from error
        about = ObjectReference(kind=identity.role.capitalize(), name=identity.name)
        message = (
            f"joined again with its certificate: address {source}, hardware UUID "
            f"{body.machine.hardware_uuid or 'unknown'}"
        )
        await self._events.record(about, "Rejoined", message)
        return answer


def _peer(request: Request) -> Peer:
    """Return the verified peer: TLS has checked fleet, time and revocation. Raises RefusedError: it has no certificate."""
    peer = peer_of(request.scope.get("state", {}).get(SSL_OBJECT))
    if peer is None:
        raise RefusedError(
            403,
            "NoCertificate",
            "joining again needs this machine's certificate of the fleet; join with a token instead",
        )
    return peer
