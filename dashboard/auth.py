"""Access to the dashboard: API keys and session cookies, roles by route, foreign pages, and headers of every answer.

Closed by default: a path that is in no table needs the role admin. Keys are those of the gateways. A login is needed on
the loopback address, too: every user of the machine and every page of its browsers could use an open port.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard import screens
from dashboard.sessions import COOKIE, Sessions
from gateway import errors
from gateway.auth.access_control import AccessControl
from identity.log_access import log_path
from identity.metrics_access import is_local
from schemas.records import Role, role_includes
from schemas.wire.errors import Refusal, RefusedError, refused

log = logging.getLogger(__name__)

PUBLIC_PATHS: Final = frozenset({"/dashboard", "/health/live", "/login", "/logout"})
"""Paths that need no key: they tell nothing of the fleet."""
TICKET_PATHS: Final = frozenset({log_path("dashboard")})
"""Paths that take a ticket of the store in place of a key; their routes check it."""
LOCAL_PATHS: Final = frozenset({"/health", "/metrics", "/sd/prometheus"})
"""Paths that clients on this machine read without a key: for Prometheus and health checks."""
_PUBLIC_PREFIXES: Final = ("/static/",)
# The document of all screens (api/page.py): it holds no data for strangers, and asks for a login itself.
_SCREEN: Final = re.compile(
    "|".join(path.replace("{name}", "[^/]+") for path in (*screens.PATHS, *screens.MOVED))
)
# The longest prefix counts. `GET` includes HEAD.
_ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "GET /": "viewer",
        "GET /api/v1/me": "user",
        "GET /api/v1/keys": "user",
        "GET /api/v1/logs": "operator",
        "GET /chat/": "user",
        "POST /": "admin",
        "POST /api/v1/actions/": "operator",
        "POST /api/v1/actions/delete": "admin",
        "POST /api/v1/apply": "admin",
        "POST /api/v1/explain/": "viewer",
        "POST /api/v1/requests/": "operator",
        "POST /api/v1/whatif": "viewer",
        "POST /chat/": "user",
    }
)
CSRF_HEADER: Final = "x-fleet-csrf"
"""Header that every change needs unless it carries an API key: a foreign page cannot send it without our consent."""
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
# No inline script, no foreign origin, no frame: what a model or a label says can never run.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# Streams end this soon after their key is deleted or their session is over.
_RECHECK_S: Final = 1.0
_HEADERS: Final = (
    ("content-security-policy", CONTENT_SECURITY_POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """The client of a request."""

    name: str
    """The name of its API key; empty without one."""
    role: Role


def needed_role(method: str, path: str) -> Role:
    """Return the role that a request needs, by the longest prefix of the table."""
    verb = "GET" if method in _SAFE else "POST" if method in ("POST", "PUT", "DELETE") else method
    rows = [row for row in _ROLES if f"{verb} {path}".startswith(row)]
    return _ROLES[max(rows, key=len)] if rows else "admin"


def is_public(method: str, path: str) -> bool:
    """Return whether a request needs no key: its answer tells nothing of the fleet, or its route takes a ticket."""
    if path in PUBLIC_PATHS or path in TICKET_PATHS or path.startswith(_PUBLIC_PREFIXES):
        return True
    return method in _SAFE and _SCREEN.fullmatch(path) is not None


class DashboardAuth:
    """ASGI middleware: refuses foreign pages, and clients without the role that a route needs."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: AccessControl,
        sessions: Sessions,
        document: Callable[[Request, int], Response],
    ) -> None:
        """`document` returns the page with a status: a browser that is refused gets it, and shows the login."""
        self._app = app
        self._access = access
        self._sessions = sessions
        self._document = document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its visitor, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"].endswith("http.response.start"):
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS:
                    headers.setdefault(name, value)
                if renewed := self._renewed(scope):
                    headers.append("set-cookie", renewed)
                headers.setdefault("cache-control", "no-store")  # files of the page say otherwise
            await send(message)

        try:
            visitor = scope.setdefault("state", {})["visitor"] = self.admit(scope)
        except RefusedError as error:
            _log_refusal(scope, error.refusal)
            response = refusal_response(error.refusal)
            if is_navigation(scope):
                scope["state"]["visitor"] = None
                response = self._document(Request(scope), error.refusal.status)
            await response(scope, receive, send_with_headers)
            return
        if visitor is None or not self._access.is_on:
            await self._app(scope, receive, send_with_headers)
            return
        await self._answer_while_admitted(scope, receive, send_with_headers)

    def _renewed(self, scope: Scope) -> str:
        """Return the `Set-Cookie` header that notes the use of a session; empty if it has been noted lately."""
        if scope["type"] != "http" or scope.get("state", {}).get("visitor") is None:
            return ""
        cookie = read_cookie(dict(scope["headers"]).get(b"cookie", b""), scope)
        found = self._sessions.renewed(cookie) if cookie else None
        if found is None:
            return ""
        response = Response()
        set_session_cookie(response, scope, *found)
        return response.headers["set-cookie"]

    async def _answer_while_admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; end a stream when the key or the session of its client ends."""

        async def answer_request() -> None:
            await self._app(scope, receive, send)

        async with asyncio.TaskGroup() as group:
            answer = group.create_task(answer_request())
            while not (await asyncio.wait({answer}, timeout=_RECHECK_S))[0]:
                try:
                    self.admit(scope)
                except RefusedError as error:
                    log.info("stream ended with its key or session", extra=_about(scope))
                    _log_refusal(scope, error.refusal)
                    answer.cancel()
                    return

    def admit(self, scope: Scope) -> Visitor | None:
        """Return the visitor of a request, None on a public path.

        Raises:
            RefusedError: it may not be answered.

        """
        headers = dict(scope["headers"])
        method, path = scope.get("method", "GET"), scope["path"]
        host = _text(headers, b"host")
        if scope["type"] == "websocket" or method not in _SAFE:
            _check_page(headers, host, is_socket=scope["type"] == "websocket")
        if is_public(method, path):
            return self._guest(scope, headers) if _SCREEN.fullmatch(path) else None
        if method in _SAFE and path in LOCAL_PATHS and is_local(scope):
            return Visitor(name="", role="viewer")
        visitor = self._identify(scope, headers)
        needed = needed_role(method, path)
        if not role_includes(visitor.role, needed):
            if not visitor.name:
                raise _login_required(needed)
            raise errors.role_required(visitor.name, visitor.role, needed)
        return visitor

    def _guest(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Visitor | None:
        """Return the visitor of a screen, whose document has the fleet's state for roles that may read it; None: a stranger."""
        try:
            return self._identify(scope, headers)
        except RefusedError:
            return None

    def _identify(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Visitor:
        if not self._access.is_on:
            # As at a gateway without keys: other machines may read, and no more.
            return Visitor(name="", role="admin" if is_local(scope) else "viewer")
        cookie = read_cookie(headers.get(b"cookie", b""), scope)
        session = self._sessions.find(cookie)
        if session is not None:
            return Visitor(name=session.name, role=session.role)
        if b"authorization" not in headers and (why := self._sessions.end_reason(cookie)):
            raise refused(401, f"Your session has ended: {why}. Log in again.", "session_ended")
        principal = self._access.identify(scope["headers"])
        assert principal is not None
        return Visitor(name=principal.name, role=principal.role)


def is_navigation(scope: Scope) -> bool:
    """Return whether a person opens an address in a browser: neither a script nor a stream asks for HTML."""
    headers = dict(scope["headers"])
    is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
    return is_read and "text/html" in _text(headers, b"accept")


def _about(scope: Scope) -> dict[str, object]:
    """Return the fields of a log line about a request; never its query, which may have texts of users."""
    client = scope.get("client")
    return {"path": scope["path"][:200], "client": "" if client is None else client[0]}


def _log_refusal(scope: Scope, refusal: Refusal) -> None:
    method = scope.get("method", "GET")
    fields = {"method": method, "status": refusal.status, "refusal": refusal.code or ""}
    log.debug("request refused", extra={**_about(scope), **fields})


def _check_page(headers: Mapping[bytes, bytes], host: str, *, is_socket: bool) -> None:
    """Refuse what a page of another origin sends: browsers add cookies to that, too. Raises RefusedError."""
    origin = _text(headers, b"origin")
    if origin and urlsplit(origin).netloc.lower() != host.lower():
        raise _foreign_page(f"a page from {origin[:200]}")
    # Only browsers send it, and no page can change it. `none` is a person who typed the address.
    site = _text(headers, b"sec-fetch-site")
    if site not in ("", "same-origin", "none"):
        raise _foreign_page(f"a {site[:40]} page")
    if is_socket or b"authorization" in headers:
        return
    if not _text(headers, CSRF_HEADER.encode()):
        message = f"A change needs the header {CSRF_HEADER}: 1, or an API key in the header authorization."
        raise refused(403, message, "csrf_header_required")
    has_body = _text(headers, b"content-length") not in ("", "0")
    if has_body and not _text(headers, b"content-type").startswith("application/json"):
        raise refused(415, "Send the body as content-type: application/json.", "json_required")


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


def _foreign_page(what: str) -> RefusedError:
    return refused(403, f"Requests of {what} are refused.", "origin_not_allowed")


def login_required(is_any: bool) -> RefusedError:  # noqa: FBT001 - a callback
    """Return the refusal of a request without a key and without a session. `is_any`: the fleet has keys."""
    make = (
        ""
        if is_any
        else " The fleet has no keys yet; `fleetctl create apikey NAME --role viewer` makes one."
    )
    message = (
        "This dashboard needs a login: open the link that `fleetctl dashboard` prints, or send an API key of the fleet as "
        f"`Authorization: Bearer KEY`. It is needed on the dashboard's own machine, too.{make}"
    )
    extra = ((b"www-authenticate", b'Bearer realm="mlx-fleet"'),)
    refusal = Refusal(status=401, message=message, code="invalid_api_key", extra_headers=extra)
    return RefusedError(refusal)


def _login_required(needed: Role) -> RefusedError:
    message = f"This needs the role {needed}. Without keys (--auth off) only clients on the dashboard's own machine have it."
    return refused(403, message, "role_required")


def cookie_name(scope: Scope) -> str:
    """Return the name of our cookie: browsers do not tell the ports of a host apart, so it has the port.

    Under https it begins with `__Host-`, so that no other host and no plain HTTP can set it.
    """
    name = f"{COOKIE}-{scope['server'][1]}"
    return f"__Host-{name}" if scope["scheme"] in ("https", "wss") else name


def set_session_cookie(response: Response, scope: Scope, cookie: str, life_s: int) -> None:
    """Set our cookie: no script reads it, and no other site's page sends it."""
    response.set_cookie(
        cookie_name(scope),
        cookie,
        max_age=life_s,
        path="/",
        httponly=True,
        samesite="strict",
        secure=scope["scheme"] == "https",
    )


def read_cookie(header: bytes, scope: Scope) -> str:
    """Return our cookie of a `Cookie` header; empty if there is none."""
    wanted = cookie_name(scope)
    # Not by `http.cookies`, which takes quadratic time for quoted values (CVE-2024-7592). Ours has no quotes.
    for pair in header.decode("latin-1").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == wanted:
            return value
    return ""


def refusal_response(refusal: Refusal) -> Response:
    """Return a refusal as an HTTP response with OpenAI's error envelope."""
    fields = {name.decode(): value.decode() for name, value in refusal.headers()}
    return Response(refusal.body(), status_code=refusal.status, headers=fields)
