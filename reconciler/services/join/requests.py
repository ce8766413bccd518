"""Requests to join without a token: POST /v1/requests, then GET /v1/requests/<id> until an administrator has answered.

A stranger gets nothing but its own words stored for ten minutes: few requests, each of few bytes, from few sources. A
certificate needs an approval of the key that asks, and the answer goes to the holder of that key alone.
"""

from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from identity import join_requests
from identity.authority import load_certificate, read_request, spki_hash
from identity.join_requests import TooManyRequestsError
from identity.names import Role
from identity.proof import is_signed_with, poll_text
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
from schemas.trust import FleetTrust, PendingJoin
from schemas.wire.join import REQUESTS_PATH, Machine, PendingAnswer, PendingBody
from store.errors import StoreError
from store.events import EventRecorder

REQUESTS_PER_MINUTE: Final = 1
POLLS_PER_MINUTE: Final = 30
_TOTAL_REQUESTS_PER_MINUTE = 20
_TOTAL_POLLS_PER_MINUTE = 600
_SCHEME = "Proof "


class PendingRequests:
    """The routes for machines without a token."""

    def __init__(
        self, admission: Admission, events: EventRecorder, *, per_minute: int = REQUESTS_PER_MINUTE
    ) -> None:
        clock = admission.clock
        self._admission = admission
        self._events = events
        total = max(per_minute, _TOTAL_REQUESTS_PER_MINUTE)
        self._asked = BodyLimits(
            SourceRateLimit(clock, per_minute=per_minute, total_per_minute=total)
        )
        self._polled = SourceRateLimit(
            clock, per_minute=POLLS_PER_MINUTE, total_per_minute=_TOTAL_POLLS_PER_MINUTE
        )

    def routes(self) -> list[Route]:
        """Return the routes of the port's application."""
        one = f"{REQUESTS_PATH}/{{id}}"
        return [
            Route(REQUESTS_PATH, self.ask, methods=["POST"]),
            Route(one, self.poll, methods=["GET"]),
            Route(one, self.end, methods=["DELETE"]),
        ]

    async def ask(self, request: Request) -> Response:
        """Store the request of a machine."""
        try:
            return respond(await self._ask(request))
        except RefusedError as error:
            return refuse(error)

    async def poll(self, request: Request) -> Response:
        """Answer the holder of a request's key: it waits, is denied, or gets its certificate."""
        try:
            join = await self._own(request)
            return respond(await self._answer(join))
        except RefusedError as error:
            return refuse(error)

    async def end(self, request: Request) -> Response:
        """Delete a request for the holder of its key, which has its certificate or gives up."""
        try:
            join = await self._own(request)
            await join_requests.remove_request(self._admission.transport, join)
        except RefusedError as error:
            return refuse(error)
        except StoreError as error:
            return refuse(refusal_of(error))
        return respond(PendingAnswer(id=join.id, state="Ended"))

    async def _ask(self, request: Request) -> PendingAnswer:
        source = source_of(request)
        body = parse_body(PendingBody, await self._asked.read(request, source))
        admission, machine = self._admission, body.machine
        name = machine.name or machine.default_name
        try:
            applicant = admission.applicant(
                Role.NODE, name, machine, body.request, NameRight.OWN_KEY
            )
            wanted = PendingJoin(
                id=join_requests.request_id(applicant.key_hash),
                name=name,
                request=body.request,
                key_hash=applicant.key_hash,
                hardware_uuid=applicant.machine.hardware_uuid,
                addresses=machine.addresses,
                source=source[:100],
                chip=body.chip,
                memory_bytes=body.memory_bytes,
                created=admission.clock.now(),
            )
            await join_requests.add_request(admission.transport, wanted)
        except TooManyRequestsError as error:
            raise RefusedError(503, "TooManyRequests", str(error), retry_after_s=60) from error
        except (AdmissionError, StoreError) as error:
            raise refusal_of(error) from error
        about = ObjectReference(kind="JoinRequest", name=wanted.id)
        message = f"{name} asks to join: address {source}"
        await self._events.record(about, "JoinRequested", message)
        return PendingAnswer(id=wanted.id, state="Pending")

    async def _own(self, request: Request) -> PendingJoin:
        """Return the request whose key has signed the question. Raises RefusedError."""
        if request.url.scheme != "https":
            raise RefusedError(400, "PlainHttp", "machines join over TLS only")
        wait_s = self._polled.take(source_of(request))
        if wait_s:
            message = f"asked too often; try again in {wait_s} s"
            raise RefusedError(429, "TooManyAttempts", message, retry_after_s=wait_s)
        admission, wanted = self._admission, request.path_params["id"][:16]
        try:
            trust = await admission.trust()
            pending_join = await join_requests.find_request(admission.transport, wanted)
        except (SignerUnreadyError, StoreError) as error:
            raise refusal_of(error) from error
        proof = request.headers.get("authorization", "").removeprefix(_SCHEME)
        if pending_join is None or not _is_proven(pending_join, trust, proof):
            raise RefusedError(
                404,
                "NoRequest",
                "there is no such request: it has ended, or was never made here; run `fleetctl join` again",
            )
        return pending_join

    async def _answer(self, found: PendingJoin) -> PendingAnswer:
        admission = self._admission
        try:
            answered = await join_requests.find_decision(admission.transport, found)
            if answered is None:
                await join_requests.renew_request(admission.transport, admission.clock, found)
                return PendingAnswer(id=found.id, state="Pending")
            decision, guard = answered
            if not decision.is_approved:
                message = "an administrator has denied this request"
                return PendingAnswer(id=found.id, state="Denied", message=message)
            machine = Machine(
                default_name=found.name,
                hardware_uuid=found.hardware_uuid,
                addresses=found.addresses[:16],
            )
            # The question is signed with the key.
            applicant = admission.applicant(
                Role.NODE, found.name, machine, found.request, NameRight.OWN_KEY
            )
            applicant = replace(applicant, repeats_since=guard.mod_revision)
            answer = await admission.admit(
                applicant, await admission.trust(), labels={}, guards=[guard]
            )
            if not found.is_issued:
                await join_requests.mark_issued(admission.transport, found)
        except (AdmissionError, SignerUnreadyError, StoreError) as error:
            raise refusal_of(error) from error
        about = ObjectReference(kind="Node", name=found.name)
        user = decision.decided_by or "an administrator"
        message = f"joined by the approval of {user}: address {found.source}"
        await self._events.record(about, "Joined", message)
        return PendingAnswer(id=found.id, state="Issued", answer=answer)


def _is_proven(found: PendingJoin, trust: FleetTrust, proof: str) -> bool:
    key = read_request(found.request.encode())
    authority = spki_hash(load_certificate(trust.authorities).public_key())
    return is_signed_with(key, poll_text(found.id, authority), proof)
