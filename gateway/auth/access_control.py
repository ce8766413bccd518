"""Access control: the key, the model and the rates of a request, and the ASGI middleware for FastAPI's routes.

The middleware asks for a key on every path outside `PUBLIC_PATHS`. Routes for admins declare
`dependencies=[Depends(require_admin)]`.
"""

import ipaddress
from collections.abc import Callable

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import errors
from gateway.auth.keyring import Keyring, Principal, lacks_scheme, presented_key
from gateway.request import RawHeaders
from machinery.clock import Clock
from schemas.wire.errors import Refusal, RefusedError

# Paths that need no key. Health checks, Prometheus and the reconciler have none; these answers
# contain nothing that a client wrote. Ollama clients read the first two before they send a key. The
# log asks for a ticket of the store instead (gateway/admin/gateway_log.py).
PUBLIC_PATHS = frozenset(
    {"/", "/api/version", "/health", "/metrics", "/metrics/demand", "/v1/logs/gateway"}
)


def requires_keys(auth: str, host: str) -> bool:
    """Return whether requests need a key: as `--auth` says; `auto` means unless only this machine can connect.

    `host`: the address that the gateway listens on.
    """
    return auth == "on" or (auth == "auto" and not ipaddress.ip_address(host).is_loopback)


class AccessControl:
    """Checks API keys. If keys are not required, every request is admitted and nothing is counted."""

    def __init__(self, keyring: Keyring, clock: Clock, *, is_on: bool) -> None:
        self._keyring = keyring
        self._clock = clock
        self._handlers: list[Callable[[str], None]] = []
        self.is_on = is_on

    def on_refusal(self, handler: Callable[[str], None]) -> None:
        """Call the handler with the reason of each refusal, in one word."""
        self._handlers.append(handler)

    def identify(self, headers: RawHeaders) -> Principal | None:
        """Return the principal of the request's key; None if keys are not required.

        Raises:
            RefusedError: the key is missing or invalid.

        """
        if not self.is_on:
            return None
        key = presented_key(headers)
        principal = self._keyring.find(key) if key else None
        if principal is None:
            raise self._nobody(headers, is_shown=bool(key))
        if principal.expires is not None and principal.expires <= self._clock.now():
            raise self._count_refusal("expired", errors.expired(principal.name, principal.expires))
        return principal

    def sees_all(self, headers: RawHeaders) -> bool:
        """Return whether the client may see every model: with an admin key, or if keys are not required."""
        if not self.is_on:
            return True
        key = presented_key(headers)
        principal = self._keyring.find(key) if key else None
        if principal is None or not principal.is_admin:
            return False
        return principal.expires is None or principal.expires > self._clock.now()

    def admit(self, principal: Principal) -> None:
        """Admit and count a request before its body is parsed; `leave` must follow.

        `allow` checks the model.

        Raises:
            RefusedError: the request is not allowed now; `leave` must not follow.

        """
        if principal.concurrency is not None and principal.in_flight >= principal.concurrency:
            refusal = errors.too_many_at_once(
                principal.name, principal.in_flight, principal.headers(self._clock.monotonic())
            )
            raise self._count_refusal("concurrency", refusal)
        if principal.is_limited:
            self._charge(principal)
        principal.in_flight += 1
        principal.requests_used += 1

    def allow(self, principal: Principal | None, model: str) -> None:
        """Raise RefusedError if the key may not use the model."""
        if principal is not None and not principal.may_ask_for(model):
            raise self._count_refusal(
                "model", errors.wrong_model(principal.name, principal.models, model)
            )

    def leave(self, principal: Principal, tokens: int) -> None:
        """Release the request's slot and charge its tokens, whose number is known only now."""
        principal.in_flight -= 1
        principal.tokens_used += tokens
        if principal.tokens is not None and tokens:
            principal.tokens.level(self._clock.monotonic())
            principal.tokens.take(tokens)

    def headers(self, principal: Principal | None) -> RawHeaders:
        """Return the rate limit headers of a response."""
        if principal is None or not principal.is_limited:
            return ()
        return principal.headers(self._clock.monotonic())

    def _charge(self, principal: Principal) -> None:
        """Charge the request to the key's rates; a refused request is not charged."""
        now_s = self._clock.monotonic()
        tokens, requests = principal.tokens, principal.requests
        if tokens is not None and tokens.level(now_s) <= 0:
            refusal = errors.too_many_tokens(
                principal.name, tokens.capacity, tokens.wait_s(1.0), principal.headers(now_s)
            )
            raise self._count_refusal("tokens", refusal)
        if requests is None:
            return
        if requests.level(now_s) < 1:
            refusal = errors.too_many_requests(
                principal.name, requests.capacity, requests.wait_s(1.0), principal.headers(now_s)
            )
            raise self._count_refusal("requests", refusal)
        requests.take(1)

    def _nobody(self, headers: RawHeaders, *, is_shown: bool) -> RefusedError:
        keyring = self._keyring
        if not keyring.is_known:
            return self._count_refusal("unknown", errors.keys_unknown())
        if is_shown:
            return self._count_refusal("wrong_key", errors.wrong_key(is_any=bool(keyring)))
        if lacks_scheme(headers):
            return self._count_refusal("no_key", errors.no_scheme())
        return self._count_refusal("no_key", errors.no_key(is_any=bool(keyring)))

    def _count_refusal(self, reason: str, refusal: RefusedError) -> RefusedError:
        for handler in self._handlers:
            handler(reason)
        return refusal


class AuthMiddleware:
    """ASGI middleware that authenticates requests and stores their principal."""

    def __init__(
        self, app: ASGIApp, *, access: AccessControl, refuse: Callable[[Scope, Refusal], Response]
    ) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        # Browsers send preflights without the authorization header; the answer reveals nothing.
        if (
            scope["type"] == "http"
            and scope["path"] not in PUBLIC_PATHS
            and scope["method"] != "OPTIONS"
        ):
            try:
                principal = self._access.identify(scope["headers"])
            except RefusedError as error:
                await self._refuse(scope, error.refusal)(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


def principal_of(request: Request) -> Principal | None:
    """Return the principal of the request; None if keys are not required."""
    principal: Principal | None = request.state.principal
    return principal


def require_admin(request: Request) -> None:
    """Refuse keys without admin rights; a FastAPI dependency.

    Raises:
        RefusedError: the key is not an admin key.

    """
    principal = principal_of(request)
    if principal is not None and not principal.is_admin:
        raise errors.not_admin(principal.name)


def can_see(request: Request, model: str) -> bool:
    """Return whether the client may see the model."""
    principal = principal_of(request)
    return principal is None or principal.may_ask_for(model)
