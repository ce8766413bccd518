"""A machine of the fleet joins again: POST /v1/rejoin, over a connection with its certificate.

It gets what a machine with a token gets: a certificate, the store's addresses, and a new password. So machines come back to a
store that was restored elsewhere, whose users are new, without a person at each of them.
"""

from typing import Final, get_args

from cryptography import x509
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from identity.authority import identity_of, life_of, load_certificate, serial_text, spki_hash
from identity.names import Identity
from identity.peers import VerifiedSSLObject, peer_of
from identity.signer import find_binding, name_taken
from machinery.http_server import SSL_OBJECT
from machinery.rate_limit import SourceRateLimit
from reconciler.services.join.admission import (
    Admission,
    AdmissionError,
    NameRight,
    SignerUnreadyError,
)
from reconciler.services.join.port import (
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
from schemas.wire.join import NAME_TAKEN, REJOIN_PATH, JoinAnswer, RejoinBody
from store import keys
from store.errors import StoreError
from store.events import EventRecorder
from store.port import Guard

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
        # Raises RefusedError: it has none.
        ssl_object = request.scope.get("state", {}).get(SSL_OBJECT)
        if peer_of(ssl_object) is None:
            raise RefusedError(
                403,
                "NoCertificate",
                "joining again needs this machine's certificate of the fleet; join with a token instead",
            )
        assert isinstance(ssl_object, VerifiedSSLObject)
        der = ssl_object.getpeercert(binary_form=True)
        assert der is not None  # of a verified peer
        certificate = x509.load_der_x509_certificate(der)
        identity = identity_of(certificate)
        if identity.role not in _ROLES:
            message = (
                f"a {identity.role} does not join; it has its credentials from the control Mac"
            )
            raise RefusedError(403, "WrongRole", message)
        body, admission = parse_body(RejoinBody, raw), self._admission
        about = ObjectReference(kind=identity.role.capitalize(), name=identity.name)
        try:
            trust = await admission.trust()
            applicant = admission.applicant(
                identity.role, identity.name, body.machine, body.request, NameRight.ANY
            )
            unchanged = await self._check_current(identity, certificate)
            await admission.check(applicant, trust)
            answer = await admission.admit(applicant, trust, labels={}, guards=unchanged)
        except (AdmissionError, SignerUnreadyError, StoreError) as error:
            refusal = refusal_of(error)
            if refusal.code == NAME_TAKEN:
                why = f"address {source}: {error}"
                await self._events.record(about, NAME_TAKEN, why, type_="Warning")
            raise refusal from error
        message = f"joined again with its certificate: address {source}"
        await self._events.record(about, "Rejoined", message)
        return answer

    async def _check_current(
        self, identity: Identity, shown: x509.Certificate
    ) -> tuple[Guard, ...]:
        """Check that the name has not got a newer certificate since; return the guard that it stays so.

        An unknown newer one is accepted: the store was restored from a backup.

        Raises:
            AdmissionError: the name was given to another key after this certificate, or it is revoked.
            StoreError: the store did not answer.

        """
        # The connection may be older than the revocation, or this process may not have read it yet.
        key = keys.named(keys.REVOKED_PREFIX, serial_text(shown))
        if await self._admission.transport.get(key) is not None:
            raise AdmissionError("Revoked", f"the certificate of {identity.uri} is revoked")
        bound = await find_binding(self._admission.transport, identity)
        if bound is None:
            return ()
        current = load_certificate(bound.record.certificate)
        is_current = spki_hash(shown.public_key()) == spki_hash(current.public_key())
        if not is_current and life_of(shown)[0] <= life_of(current)[0]:
            raise AdmissionError(NAME_TAKEN, name_taken(identity))
        return (bound.version,)
