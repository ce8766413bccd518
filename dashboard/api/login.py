"""Login of browsers: an API key, or the ticket of a login link, becomes a session cookie that scripts cannot read."""

import logging
import re
from dataclasses import dataclass
from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response

from dashboard.api.request_json import read_json
from dashboard.api.routes import json_response
from dashboard.auth import Visitor, cookie_name, read_cookie, set_session_cookie
from dashboard.sessions import LIFE_S, Sessions
from gateway.auth.access_control import AccessControl
from insight.conditions import Row
from machinery.clock import Clock
from machinery.rate_limit import SourceRateLimit
from machinery.request_body import BodyReader
from schemas.records import Role
from schemas.wire.errors import RefusedError, invalid, refused
from store.tickets import TicketChecker, TicketDenial

log = logging.getLogger(__name__)
_BODY_LIMIT: Final = 4096
_TICKET: Final = re.compile(r"[0-9a-f]{8,64}\.[A-Za-z0-9_-]{20,200}", re.ASCII)
# Logins a minute. A person types one key; a script that guesses gets no further.
_PER_ADDRESS: Final = 20
_TOTAL: Final = 300


class LoginBody(msgspec.Struct):
    """An API key, or the ticket of a login link."""

    key: str = ""
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class LoginRoutes:
    """Handlers of `/login` and `/logout`."""

    access: AccessControl
    sessions: Sessions
    bodies: BodyReader
    tickets: TicketChecker
    limit: SourceRateLimit
    can_write: bool

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/login", self.login, methods=["POST"])
        router.add_api_route("/logout", self.logout, methods=["POST"])
        router.add_api_route("/api/v1/me", self.me, methods=["GET"])

    async def login(self, request: Request) -> Response:
        """Check the API key or the ticket in the body, and set the session's cookie."""
        if not self.access.is_on:
            return json_response({"name": "", "role": "admin"})
        self._count(request)
        body = await read_json(self.bodies, request, LoginBody)
        way = "ticket" if body.ticket else "key"
        try:
            cookie, name, role = (
                await self._by_ticket(body.ticket) if body.ticket else self._by_key(body.key)
            )
        except RefusedError as error:
            # As the audit of an address that guesses; the secret itself is in no log.
            extra = {"client": _address(request), "way": way, "refusal": error.refusal.code or ""}
            log.warning("login refused", extra=extra)
            raise
        log.info("login", extra={"user": name, "role": role, "way": way})
        if way == "key":
            self.sessions.keep_secret(cookie, body.key.strip())
        response = json_response({"name": name, "role": role})
        set_session_cookie(response, request.scope, cookie, LIFE_S)
        return response

    def _count(self, request: Request) -> None:
        """Raise RefusedError after too many logins of this address, or of all."""
        wait_s = self.limit.take(_address(request))
        if wait_s:
            message = f"There were too many logins. Try again in {wait_s} s."
            raise refused(429, message, retry_after_s=wait_s)

    def _by_key(self, key: str) -> tuple[str, str, Role]:
        if not key or not key.isascii() or not key.isprintable():
            raise invalid('The body has no key: expected {"key": "sk-fleet-..."}.', "key")
        headers = [(b"authorization", b"Bearer " + key.strip().encode())]
        principal = self.access.identify(headers)
        assert principal is not None
        cookie = self.sessions.make(principal.name)
        if cookie is None:
            raise refused(503, "The keys are not known yet; try again soon.")
        return cookie, principal.name, principal.role

    async def _by_ticket(self, ticket: str) -> tuple[str, str, Role]:
        if not _TICKET.fullmatch(ticket):
            raise invalid("The login link is not complete. Copy the whole link.", "ticket")
        granted = await self.tickets.redeem(f"Bearer {ticket}")
        if isinstance(granted, TicketDenial):
            message = f"The login link does not work: {granted.why}."
            if granted.status == 401:
                message = "The login link was used, or its 60 seconds are over. `fleetctl dashboard` opens another."
            raise refused(granted.status, message)
        cookie = self.sessions.make_admin(granted.user)
        session = self.sessions.find(cookie)
        assert session is not None
        return cookie, session.name, session.role

    async def logout(self, request: Request) -> Response:
        """Remove the session's cookie."""
        self.sessions.end(_cookie_of(request))
        response = json_response({"name": "", "role": None})
        secure = request.url.scheme == "https"
        response.delete_cookie(
            cookie_name(request.scope), httponly=True, samesite="strict", secure=secure
        )
        return response

    async def me(self, request: Request) -> Response:
        """Tell the client its name and role, and whether this process may change the fleet."""
        return json_response(self.describe(request))

    def describe(self, request: Request) -> Row:
        """Return what a client is told about itself."""
        visitor: Visitor = request.state.visitor
        return {
            "name": visitor.name,
            "role": visitor.role,
            "needsLogin": self.access.is_on,
            "hasChatKey": bool(self.sessions.secret_of(_cookie_of(request))),
            "canWrite": self.can_write,
        }


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _cookie_of(request: Request) -> str:
    return read_cookie(request.headers.get("cookie", "").encode("latin-1"), request.scope)


def make_login(
    access: AccessControl,
    sessions: Sessions,
    tickets: TicketChecker,
    clock: Clock,
    *,
    can_write: bool,
) -> LoginRoutes:
    """Return the routes; a body has 4 KiB and ten seconds."""
    return LoginRoutes(
        access,
        sessions,
        BodyReader(limit_bytes=_BODY_LIMIT, limit_s=10.0, at_once=16),
        tickets,
        SourceRateLimit(clock, per_minute=_PER_ADDRESS, total_per_minute=_TOTAL),
        can_write,
    )
