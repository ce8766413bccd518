"""What is said to who may not ask, in OpenAI's words. No key is in any of it, nor a part of one."""

import math
from collections.abc import Iterable

from gateway.auth.keyring import Principal
from gateway.errors import Refusal, RefusedError

_WHO = ((b"www-authenticate", b'Bearer realm="mlx-fleet"'),)
_HOW = "send it as `Authorization: Bearer KEY` (or as `x-api-key` or `api-key`)"
_MAKE = "`fleetctl create apikey NAME` makes one"
_NAMES_SHOWN = 20


def no_key(*, is_any: bool) -> RefusedError:
    """Return the refusal of a request without a key; `is_any`: whether the fleet has keys at all."""
    if is_any:
        message = f"This gateway wants an API key: {_HOW}. Whoever runs the fleet has it; {_MAKE}."
    else:
        message = (
            f"This gateway wants an API key, and the fleet has none yet: {_MAKE}, then {_HOW}. A gateway "
            "that listens on loopback alone, or was started with --auth off, asks for none."
        )
    return RefusedError(_refusal(401, message, "invalid_api_key", _WHO))


def no_scheme() -> RefusedError:
    """Return the refusal of a header `authorization` that does not begin as it should."""
    message = (
        "The header `authorization` does not begin with `Bearer `: send it as `Authorization: Bearer KEY`, "
        "or the key alone as `x-api-key` or `api-key`."
    )
    return RefusedError(_refusal(401, message, "invalid_api_key", _WHO))


def wrong_key(*, is_any: bool) -> RefusedError:
    """Return the refusal of a key that nobody has, or has any more."""
    also = "" if is_any else " The fleet has no keys at all yet."
    message = (
        "The API key is not known here: it was mistyped or revoked, or belongs to another fleet."
        f"{also} `fleetctl get apikeys` lists those there are; {_MAKE}."
    )
    return RefusedError(_refusal(401, message, "invalid_api_key", _WHO))


def expired(holder: Principal) -> RefusedError:
    """Return the refusal of a key whose time is over."""
    assert holder.expires is not None
    message = (
        f"The API key '{holder.name}' expired on {holder.expires:%Y-%m-%d %H:%M} UTC; {_MAKE}."
    )
    return RefusedError(_refusal(401, message, "api_key_expired", _WHO))


def keys_unknown() -> RefusedError:
    """Return what to say before the keys were read from the store."""
    refusal = Refusal(
        status=503,
        message="The gateway has not been able to read the fleet's API keys from etcd yet. If this lasts, its "
        "user there may not read them: run `fleetctl init-auth` again.",
        type="server_error",
        code="not_synced",
        retry_after_s=2,
    )
    return RefusedError(refusal)


def wrong_model(holder: Principal, name: str) -> RefusedError:
    """Return the refusal of a model that the key is not for; whether there is such a model is not said."""
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    known = sorted(holder.models)
    more = len(known) - _NAMES_SHOWN
    listed = ", ".join(known[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    message = f"The API key '{holder.name}' is not for the model '{shown}', but for: {listed}."
    return RefusedError(
        Refusal(status=403, message=message, param="model", code="model_not_allowed")
    )


def not_admin(holder: Principal) -> RefusedError:
    """Return the refusal of the admin API to a key that is not for it."""
    message = (
        f"The API key '{holder.name}' is not for the admin API; `fleetctl create apikey NAME --admin` makes one "
        "that is."
    )
    return RefusedError(_refusal(403, message, "admin_required"))


def too_many_at_once(holder: Principal, now_s: float) -> RefusedError:
    """Return the refusal of a request beside as many as the key may have under way."""
    message = (
        f"The API key '{holder.name}' has {holder.in_flight} requests under way at this gateway, as many as it "
        "may; repeat the request when one has ended."
    )
    return _too_much(holder, message, 1.0, now_s)


def too_many_requests(holder: Principal, wait_s: float, now_s: float) -> RefusedError:
    """Return the refusal of a request over the key's rate."""
    assert holder.requests is not None
    message = (
        f"The API key '{holder.name}' has used up its requests for now (at this gateway "
        f"{holder.requests.capacity:.6g} per minute); repeat the request in {math.ceil(wait_s)} s."
    )
    return _too_much(holder, message, wait_s, now_s)


def too_many_tokens(holder: Principal, wait_s: float, now_s: float) -> RefusedError:
    """Return the refusal of a request after too many tokens."""
    assert holder.tokens is not None
    message = (
        f"The API key '{holder.name}' has used up its tokens for now (at this gateway "
        f"{holder.tokens.capacity:.6g} per minute, prompts and answers); repeat the request in "
        f"{math.ceil(wait_s)} s."
    )
    return _too_much(holder, message, wait_s, now_s)


def _too_much(holder: Principal, message: str, wait_s: float, now_s: float) -> RefusedError:
    refusal = Refusal(
        status=429,
        message=message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=max(1, math.ceil(wait_s)),
        more=tuple(holder.headers(now_s)),
    )
    return RefusedError(refusal)


def _refusal(
    status: int, message: str, code: str, more: Iterable[tuple[bytes, bytes]] = ()
) -> Refusal:
    return Refusal(status=status, message=message, code=code, more=tuple(more))
