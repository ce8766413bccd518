"""Access control: the key, the model and the limits of a request, and the ASGI middleware for FastAPI's routes.

The middleware asks for a key on every path outside `PUBLIC_PATHS`. `roles.py` has the role that each route needs.
"""

import ipaddress
from collections.abc import Callable, Mapping
from hashlib import sha256
from types import MappingProxyType

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import errors
from gateway.auth.keyring import (
    Keyring,
    KeySecret,
    Principal,
    lacks_scheme,
    presented_key,
)
from gateway.auth.rate_limits import AnonymousClients, ModelRates, RateLimiter, Rates, rates_of
from gateway.auth.roles import PUBLIC_PATHS
from gateway.request import RawHeaders
from gateway.routing.selection import idle_models, nearest
from gateway.routing.table import RoutingTable, ServedModel
from machinery.clock import Clock
from machinery.prometheus import Counter
from schemas.records import API_KEY_MARKER, role_includes
from schemas.wire.errors import Refusal, RefusedError

_MARKER = API_KEY_MARKER.encode()
_NO_FIELDS: Mapping[bytes, bytes] = MappingProxyType({})


def requires_keys(auth: str, host: str) -> bool:
    """Return whether requests need a key: as `--auth` says; `auto` means unless only this machine can connect.

    `host`: the address that the gateway listens on.
    """
    return auth == "on" or (auth == "auto" and not ipaddress.ip_address(host).is_loopback)


class AccessControl:
    """Checks API keys and limits.

    Where keys are not required, a client without one has the limits of its address, or none. One that shows a key of the
    fleet has that key's rights and limits. Other keys are ignored: clients of local servers send "ollama" or "none".
    """

    def __init__(
        self,
        keyring: Keyring,
        clock: Clock,
        *,
        is_on: bool,
        anonymous: AnonymousClients | None = None,
        refuse_keyless: Callable[[bool], RefusedError] = errors.no_key,
    ) -> None:
        """Know no keys yet.

        Args:
            keyring: The fleet's keys.
            clock: The clock.
            is_on: Keys are required.
            anonymous: Limits of clients without a key; None: none.
            refuse_keyless: Returns the refusal of a request without a key; its argument: the fleet has keys.

        """
        self._refuse_keyless = refuse_keyless
        self._keyring = keyring
        self._clock = clock
        self.refusals: Counter | None = None
        """Counts refusals by their reason, in one word."""
        self.is_on = is_on
        self.anonymous = anonymous
        self.model_rates = ModelRates(clock)

    def identify(
        self, headers: RawHeaders, fields: Mapping[bytes, bytes] = _NO_FIELDS
    ) -> Principal | None:
        """Return the principal of the request's key; None for a client that needs none. `fields`: the headers, if known.

        Raises:
            RefusedError: the key is missing or invalid.

        """
        # As most clients send it: without a walk through the headers.
        value = fields.get(b"authorization", b"")
        if (
            value.startswith(b"Bearer ")
            and len(fields) == len(headers)
            and not (b"x-api-key" in fields or b"api-key" in fields)
        ):
            key = value[7:].strip()
        else:
            key = presented_key(headers)
        if not self.is_on and (not key.startswith(_MARKER) or not self._keyring.is_known):
            return None
        secret = self._keyring.by_digest.get(sha256(key).digest())
        if secret is None:
            raise self._nobody(headers, is_shown=bool(key))
        principal = secret.principal
        if secret.expires is not None and secret.expires <= self._clock.now():
            raise self._expired(secret)
        if secret.is_previous:
            principal.previous_used += 1
        return principal

    def _expired(self, secret: KeySecret) -> RefusedError:
        name = secret.principal.name
        if secret.replaced_until is not None:
            return self._count_refusal("expired", errors.replaced(name, secret.replaced_until))
        assert secret.expires is not None
        return self._count_refusal("expired", errors.expired(name, secret.expires))

    def sees_all(self, headers: RawHeaders) -> bool:
        """Return whether the client may see every model: as a viewer, or without a key where none is required."""
        key = presented_key(headers)
        if not self.is_on and not key.startswith(_MARKER):
            return True
        secret = self._keyring.secret(key) if key else None
        if secret is None or not role_includes(secret.principal.role, "viewer"):
            return False
        return secret.expires is None or secret.expires > self._clock.now()

    def admit(self, limiters: tuple[RateLimiter, ...]) -> None:
        """Admit and count a request under all these limits, or under none; `leave` must follow.

        Raises:
            RefusedError: the request is over one of them; it is charged to none, and `leave` must not follow.

        """
        for limiter in limiters:
            if limiter.is_limited and (over := limiter.check(self._clock.monotonic())):
                reason, refusal = over
                raise self._count_refusal(limiter.kind + reason, RefusedError(refusal))
        for limiter in limiters:
            limiter.enter()

    def model_limiters(
        self, principal: Principal | None, model: str, served: ServedModel | None
    ) -> tuple[RateLimiter, ...]:
        """Return the limits of this model: of all callers together, and of the key for it."""
        rate_limiters: tuple[RateLimiter, ...] = ()
        if served is not None and (common := self.model_rates.of(served)) is not None:
            rate_limiters = (common,)
        if principal is not None and (own := principal.by_model.get(model)) is not None:
            rate_limiters = (own, *rate_limiters)
        return rate_limiters

    def allow(self, principal: Principal | None, model: str) -> None:
        """Raise RefusedError if the key may not use the model."""
        if principal is not None and not principal.may_ask_for(model):
            raise self._count_refusal(
                "model", errors.wrong_model(principal.name, principal.models, model)
            )

    def refund(self, limiters: tuple[RateLimiter, ...]) -> None:
        """Charge nothing for an admitted request for which nothing is done; `leave` must follow."""
        for limiter in limiters:
            if limiter.requests is not None:
                limiter.requests.take(-1)

    def may_use(self, principal: Principal | None) -> Callable[[str], bool]:
        """Return whether a client may use a model, by the model's name."""
        return (lambda _: True) if principal is None else principal.may_ask_for

    def unknown_model(
        self, principal: Principal | None, table: RoutingTable, name: str
    ) -> RefusedError:
        """Return the refusal of a name that is not declared. It names only models that the key may use."""
        known = sorted(filter(self.may_use(principal), table.models))
        return RefusedError(
            errors.unknown_model(name, known, nearest(known, name), idle_models(table))
        )

    def rates(self, limiters: tuple[RateLimiter, ...]) -> Rates:
        """Return the rates of a request, for the headers of its response."""
        return rates_of(limiters, self._clock)

    def _nobody(self, headers: RawHeaders, *, is_shown: bool) -> RefusedError:
        keyring = self._keyring
        if not keyring.is_known:
            return self._count_refusal("unknown", errors.keys_unknown())
        if is_shown:
            return self._count_refusal("wrong_key", errors.wrong_key(is_any=bool(keyring)))
        if lacks_scheme(headers):
            return self._count_refusal("no_key", errors.no_scheme())
        return self._count_refusal("no_key", self._refuse_keyless(bool(keyring)))

    def _count_refusal(self, reason: str, refusal: RefusedError) -> RefusedError:
        if self.refusals is not None:
            self.refusals.add(reason)
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


def owner_of(request: Request) -> str:
    """Return the identity of the request's API key; empty if keys are not required."""
    principal = principal_of(request)
    return "" if principal is None else principal.identity
