"""Whether a request may be made: its key, its model, its rates. Sends nothing."""

import ipaddress
from collections.abc import Callable

from gateway.access import refusals
from gateway.access.holder import Holder
from gateway.access.keyring import Keyring, is_bare, shown_key
from gateway.asks import RawHeaders
from gateway.errors import RefusedError
from machinery.clock import Clock


def asks_for_keys(auth: str, host: str) -> bool:
    """Return whether requests need a key: as `--auth` says, else unless only this machine reaches us.

    `host`: the address that is listened on.
    """
    return auth == "on" or (auth == "auto" and not ipaddress.ip_address(host).is_loopback)


class Access:
    """The door. Where keys are not asked for, everybody is let in and nothing is counted."""

    def __init__(self, keyring: Keyring, clock: Clock, *, is_on: bool) -> None:
        self._keyring = keyring
        self._clock = clock
        self._handlers: list[Callable[[str], None]] = []
        self.is_on = is_on

    def on_refusal(self, handler: Callable[[str], None]) -> None:
        """Have the handler called with the reason of each refusal, in a word."""
        self._handlers.append(handler)

    def identify(self, headers: RawHeaders) -> Holder | None:
        """Return who asks; None where keys are not asked for.

        Raises:
            RefusedError: no key, or none that is good.

        """
        if not self.is_on:
            return None
        key = shown_key(headers)
        holder = self._keyring.find(key) if key else None
        if holder is None:
            raise self._nobody(headers, is_shown=bool(key))
        if holder.expires is not None and holder.expires <= self._clock.now():
            raise self._told("expired", refusals.expired(holder))
        return holder

    def sees_all(self, headers: RawHeaders) -> bool:
        """Return whether who asks may see every name: an admin, or anybody where keys are not asked for."""
        if not self.is_on:
            return True
        key = shown_key(headers)
        holder = self._keyring.find(key) if key else None
        if holder is None or not holder.is_admin:
            return False
        return holder.expires is None or holder.expires > self._clock.now()

    def enter(self, headers: RawHeaders) -> Holder | None:
        """Let a request in, and count it, before its body is read; `leave` must follow if somebody is returned.

        Whether the key is for its model is another question: `allow`.

        Raises:
            RefusedError: it may not be made, or not now.

        """
        holder = self.identify(headers)
        if holder is None:
            return None
        if holder.concurrency is not None and holder.in_flight >= holder.concurrency:
            refusal = refusals.too_many_at_once(holder, self._clock.monotonic())
            raise self._told("concurrency", refusal)
        if holder.is_limited:
            self._charge(holder)
        holder.in_flight += 1
        holder.requests_used += 1
        return holder

    def allow(self, holder: Holder | None, model: str) -> None:
        """Raise RefusedError if the model is none that the key is for."""
        if holder is not None and not holder.may_ask_for(model):
            raise self._told("model", refusals.wrong_model(holder, model))

    def leave(self, holder: Holder, tokens: int) -> None:
        """Count a request no more, and charge its tokens: only now is it known how many there were."""
        holder.in_flight -= 1
        holder.tokens_used += tokens
        if holder.tokens is not None and tokens:
            holder.tokens.level(self._clock.monotonic())
            holder.tokens.take(tokens)

    def headers(self, holder: Holder | None) -> RawHeaders:
        """Return what an answer says of the key's rates."""
        if holder is None or not holder.is_limited:
            return ()
        return holder.headers(self._clock.monotonic())

    def _charge(self, holder: Holder) -> None:
        """Take a request's part of what may be taken; nothing is taken from what is refused."""
        now_s = self._clock.monotonic()
        tokens, requests = holder.tokens, holder.requests
        if tokens is not None and tokens.level(now_s) <= 0:
            refusal = refusals.too_many_tokens(holder, tokens.wait_s(1.0), now_s)
            raise self._told("tokens", refusal)
        if requests is None:
            return
        if requests.level(now_s) < 1:
            refusal = refusals.too_many_requests(holder, requests.wait_s(1.0), now_s)
            raise self._told("requests", refusal)
        requests.take(1)

    def _nobody(self, headers: RawHeaders, *, is_shown: bool) -> RefusedError:
        keyring = self._keyring
        if not keyring.is_known:
            return self._told("unknown", refusals.keys_unknown())
        if is_shown:
            return self._told("wrong_key", refusals.wrong_key(is_any=bool(keyring)))
        if is_bare(headers):
            return self._told("no_key", refusals.no_scheme())
        return self._told("no_key", refusals.no_key(is_any=bool(keyring)))

    def _told(self, reason: str, refusal: RefusedError) -> RefusedError:
        for handler in self._handlers:
            handler(reason)
        return refusal
