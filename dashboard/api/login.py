"""Login of browsers: an API key becomes a session cookie that scripts cannot read."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs

import orjson
from fastapi import APIRouter, Request, Response

from dashboard.api.routes import json_response
from dashboard.sessions import COOKIE, LIFE_S, Sessions
from gateway.auth.access_control import AccessControl
from machinery.request_body import BodyReader, RequestRefusedError
from schemas.wire.errors import Refusal, RefusedError, invalid

_BODY_LIMIT: Final = 4096


@dataclass(frozen=True, slots=True)
class LoginRoutes:
    """Handlers of `/login` and `/logout`."""

    access: AccessControl
    sessions: Sessions
    bodies: BodyReader

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/login", self.login, methods=["POST"])
        router.add_api_route("/logout", self.logout, methods=["POST"])

    async def login(self, request: Request) -> Response:
        """Check the API key in the body ({"key": "..."}, or a form), and set the session's cookie."""
        if not self.access.is_on:
            return json_response({"name": "", "role": "admin", "needsKey": False})
        try:
            key = _key(await self.bodies.read(request), request.headers.get("content-type", ""))
        except RequestRefusedError as error:
            raise RefusedError(Refusal(status=error.status, message=str(error))) from error
        principal = self.access.identify([(b"authorization", b"Bearer " + key)])
        assert principal is not None
        cookie = self.sessions.make(principal.name)
        if cookie is None:
            raise RefusedError(
                Refusal(status=503, message="The keys are not known yet; try again soon.")
            )
        response = json_response({"name": principal.name, "role": principal.role, "needsKey": True})
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=LIFE_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def logout(self) -> Response:
        """Remove the session's cookie."""
        response = json_response({"name": "", "role": None})
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response


def _key(body: bytes, content_type: str) -> bytes:
    """Return the key in a login's body. Raises RefusedError."""
    if content_type.startswith("application/x-www-form-urlencoded"):
        key = parse_qs(body.decode("latin-1"), max_num_fields=4).get("key", [""])[0]
    else:
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError:
            parsed = None
        found = parsed.get("key") if isinstance(parsed, dict) else None
        key = found if isinstance(found, str) else ""
    if not key or not key.isascii() or not key.isprintable():
        raise invalid('The body has no key: expected {"key": "sk-fleet-..."}.', "key")
    return key.strip().encode()


def make_login(access: AccessControl, sessions: Sessions) -> LoginRoutes:
    """Return the routes; a body has 4 KiB and ten seconds."""
    return LoginRoutes(
        access, sessions, BodyReader(limit_bytes=_BODY_LIMIT, limit_s=10.0, at_once=16)
    )
