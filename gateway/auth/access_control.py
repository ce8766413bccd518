"""Whether a request may be made: its key, its model, its rates. Sends nothing.

The door of all that is no request to a model: FastAPI's routes. Whatever is not open asks for a key.

A route that is for admins alone says so: `dependencies=[Depends(admin_only)]`.
"""

import ipaddress
from collections.abc import Callable

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth import auth_errors
from gateway.auth.keyring import Keyring, Principal, lacks_scheme, presented_key
from gateway.errors import Refusal, RefusedError
from gateway.request import RawHeaders
from machinery.clock import Clock


def requires_keys(auth: str, host: str) -> bool:
    """Return whether requests need a key: as `--auth` says, else unless only this machine reaches us.

    `host`: the address that is listened on.
    """
    return auth == "on" or (auth == "auto" and not ipaddress.ip_address(host).is_loopback)


class AccessControl:
    """The door. Where keys are not asked for, everybody is let in and nothing is counted."""

    def __init__(self, keyring: Keyring, clock: Clock, *, is_on: bool) -> None:
        self._keyring = keyring
        self._clock = clock
        self._handlers: list[Callable[[str], None]] = []
        self.is_on = is_on

    def on_refusal(self, handler: Callable[[str], None]) -> None:
        """Have the handler called with the reason of each refusal, in a word."""
        self._handlers.append(handler)

    def identify(self, headers: RawHeaders) -> Principal | None:
        """Return who asks; None where keys are not asked for.

        Raises:
            RefusedError: no key, or none that is good.

        """
        if not self.is_on:
            return None
        key = presented_key(headers)
        holder = self._keyring.find(key) if key else None
        if holder is None:
            raise self._nobody(headers, is_shown=bool(key))
        if holder.expires is not None and holder.expires <= self._clock.now():
            raise self._told("expired", auth_errors.expired(holder))
        return holder

    def sees_all(self, headers: RawHeaders) -> bool:
        """Return whether who asks may see every name: an admin, or anybody where keys are not asked for."""
        if not self.is_on:
            return True
        key = presented_key(headers)
        holder = self._keyring.find(key) if key else None
        if holder is None or not holder.is_admin:
            return False
        return holder.expires is None or holder.expires > self._clock.now()

    def enter(self, headers: RawHeaders) -> Principal | None:
        """Let a request in, and count it, before its body is read; `leave` must follow if somebody is returned.

        Whether the key is for its model is another question: `allow`.

        Raises:
            RefusedError: it may not be made, or not now.

        """
        holder = self.identify(headers)
        if holder is None:
            return None
        if holder.concurrency is not None and holder.in_flight >= holder.concurrency:
            refusal = auth_errors.too_many_at_once(holder, self._clock.monotonic())
            raise self._told("concurrency", refusal)
        if holder.is_limited:
            self._charge(holder)
        holder.in_flight += 1
        holder.requests_used += 1
        return holder

    def allow(self, holder: Principal | None, model: str) -> None:
        """Raise RefusedError if the model is none that the key is for."""
        if holder is not None and not holder.may_ask_for(model):
            raise self._told("model", auth_errors.wrong_model(holder, model))

    def leave(self, holder: Principal, tokens: int) -> None:
        """Count a request no more, and charge its tokens: only now is it known how many there were."""
        holder.in_flight -= 1
        holder.tokens_used += tokens
        if holder.tokens is not None and tokens:
            holder.tokens.level(self._clock.monotonic())
            holder.tokens.take(tokens)

    def headers(self, holder: Principal | None) -> RawHeaders:
        """Return what an answer says of the key's rates."""
        if holder is None or not holder.is_limited:
            return ()
        return holder.headers(self._clock.monotonic())

    def _charge(self, holder: Principal) -> None:
        """Take a request's part of what may be taken; nothing is taken from what is refused."""
        now_s = self._clock.monotonic()
        tokens, requests = holder.tokens, holder.requests
        if tokens is not None and tokens.level(now_s) <= 0:
            refusal = auth_errors.too_many_tokens(holder, tokens.wait_s(1.0), now_s)
            raise self._told("tokens", refusal)
        if requests is None:
            return
        if requests.level(now_s) < 1:
            refusal = auth_errors.too_many_requests(holder, requests.wait_s(1.0), now_s)
            raise self._told("requests", refusal)
        requests.take(1)

    def _nobody(self, headers: RawHeaders, *, is_shown: bool) -> RefusedError:
        keyring = self._keyring
        if not keyring.is_known:
            return self._told("unknown", auth_errors.keys_unknown())
        if is_shown:
            return self._told("wrong_key", auth_errors.wrong_key(is_any=bool(keyring)))
        if lacks_scheme(headers):
            return self._told("no_key", auth_errors.no_scheme())
        return self._told("no_key", auth_errors.no_key(is_any=bool(keyring)))

    def _told(self, reason: str, refusal: RefusedError) -> RefusedError:
        for handler in self._handlers:
            handler(reason)
        return refusal


# Health checks and Prometheus have no key, and neither has the reconciler, which reads the demand. Health
# tells numbers, metrics names and numbers, and neither anything that a client wrote. Ollama's clients look at the first two, which tell
# that there is somebody, before they show a key.
# The log asks for a ticket from the store instead of a key (gateway/admin/gateway_log.py).
PUBLIC_PATHS = frozenset(
    {"/", "/api/version", "/health", "/metrics", "/metrics/demand", "/v1/logs/gateway"}
)


class AuthMiddleware:
    """ASGI middleware: lets in who has a key, and notes who it is."""

    def __init__(
        self, app: ASGIApp, *, access: AccessControl, refuse: Callable[[Scope, Refusal], Response]
    ) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        # Browsers ask beforehand without the headers that they ask about; there is nothing in the answer.
        if (
            scope["type"] == "http"
            and scope["path"] not in PUBLIC_PATHS
            and scope["method"] != "OPTIONS"
        ):
            try:
                holder = self._access.identify(scope["headers"])
            except RefusedError as error:
                await self._refuse(scope, error.refusal)(scope, receive, send)
                return
            scope.setdefault("state", {})["holder"] = holder
        await self._app(scope, receive, send)


def principal_of(request: Request) -> Principal | None:
    """Return who asks; None where keys are not asked for."""
    holder: Principal | None = request.state.holder
    return holder


def require_admin(request: Request) -> None:
    """Refuse keys that are not for the admin API: a dependency of its routes.

    Raises:
        RefusedError: it is another key.

    """
    holder = principal_of(request)
    if holder is not None and not holder.is_admin:
        raise auth_errors.not_admin(holder)


def can_see(request: Request, model: str) -> bool:
    """Return whether who asks may know of the model."""
    holder = principal_of(request)
    return holder is None or holder.may_ask_for(model)
