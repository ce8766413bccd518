"""Access to the dashboard: API keys and session cookies, roles by route, foreign pages, and headers of every answer.

Closed by default: a path that is in no table needs the role admin. Keys are those of the gateways; `--auth auto` asks
for them unless only this machine can connect.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard.sessions import COOKIE, Sessions
from gateway import errors
from gateway.auth.access_control import AccessControl
from identity.metrics_access import is_local
from machinery import host_header
from schemas.records import Role, role_includes
from schemas.wire.errors import Refusal, RefusedError

PUBLIC_PATHS: Final = frozenset({"/health/live", "/login", "/logout"})
"""Paths that need no key: they tell nothing of the fleet."""
_PUBLIC_PREFIXES: Final = ("/static/",)
# The document of all screens (api/page.py): it holds no data, and asks for a key itself.
_SCREEN: Final = re.compile(
    r"/(?:(?:macs|models|groups|replicas)(?:/[^/]+)?|requests|events|chat|add)?"
)
# The longest prefix counts. `GET` includes HEAD.
_ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "GET /": "viewer",
        "POST /": "operator",
        "POST /api/v1/check": "viewer",
        "POST /api/v1/explain/": "viewer",
        "POST /api/v1/whatif": "viewer",
        "POST /chat/": "user",
        "GET /chat/": "user",
    }
)
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
# No inline script, no foreign origin, no frame: what a model or a label says can never run.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
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
    """Return whether a request needs no key: its answer tells nothing of the fleet."""
    if path in PUBLIC_PATHS or path.startswith(_PUBLIC_PREFIXES):
        return True
    return method in _SAFE and _SCREEN.fullmatch(path) is not None


class DashboardAuth:
    """ASGI middleware: refuses foreign hosts and pages, and clients without the role that a route needs."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: AccessControl,
        sessions: Sessions,
        hosts: Collection[str] | None,
    ) -> None:
        """`hosts`: the names by which clients address this process; None: any, since every request needs a key."""
        self._app = app
        self._access = access
        self._sessions = sessions
        self._hosts = hosts

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
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            scope.setdefault("state", {})["visitor"] = self.admit(scope)
        except RefusedError as error:
            await refusal_response(error.refusal)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def admit(self, scope: Scope) -> Visitor | None:
        """Return the visitor of a request, None on a public path.

        Raises:
            RefusedError: it may not be answered.

        """
        headers = dict(scope["headers"])
        method, path = scope.get("method", "GET"), scope["path"]
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and host and not host_header.is_known(host, self._hosts):
            raise RefusedError(errors.wrong_host(host))
        # Browsers let a page of any origin open a WebSocket, with cookies.
        self._check_origin(
            "POST" if scope["type"] == "websocket" else method, host, headers.get(b"origin")
        )
        if is_public(method, path):
            return None
        visitor = self._identify(scope, headers)
        needed = needed_role(method, path)
        if not role_includes(visitor.role, needed):
            if not visitor.name:
                raise errors.key_required(needed)
            raise errors.role_required(visitor.name, visitor.role, needed)
        return visitor

    def _check_origin(self, method: str, host: str, origin: bytes | None) -> None:
        """Refuse requests that a page of another origin sends: browsers add cookies to those, too."""
        if origin is None or method in _SAFE:
            return
        if urlsplit(origin.decode("latin-1")).netloc.lower() != host.lower():
            raise RefusedError(errors.wrong_origin(origin.decode("latin-1")))

    def _identify(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Visitor:
        if not self._access.is_on:
            # As at a gateway without keys: other machines may read, and no more.
            return Visitor(name="", role="admin" if is_local(scope) else "viewer")
        session = self._sessions.find(_cookie(headers.get(b"cookie", b"")))
        if session is not None:
            return Visitor(name=session.name, role=session.role)
        principal = self._access.identify(scope["headers"])
        assert principal is not None
        return Visitor(name=principal.name, role=principal.role)


def _cookie(header: bytes) -> str:
    """Return our cookie of a `Cookie` header; empty if there is none."""
    try:
        found = SimpleCookie(header[:8192].decode("latin-1")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def refusal_response(refusal: Refusal) -> Response:
    """Return a refusal as an HTTP response with OpenAI's error envelope."""
    fields = {name.decode(): value.decode() for name, value in refusal.headers()}
    return Response(refusal.body(), status_code=refusal.status, headers=fields)
