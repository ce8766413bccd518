"""Errors that clients of the gateway get. The envelope is in schemas/wire/errors.py."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from schemas.deployment import HUB_REPO_PATTERN
from schemas.records import Role
from schemas.wire import headers
from schemas.wire.errors import ErrorBody, Refusal, RefusedError, refused, unavailable

# A fleet may serve hundreds of models, and a person reads the message.
_NAMES_SHOWN = 20
# ORGANISATION/NAME, with the revision or tag that other tools write behind it.
_HUB_NAME = re.compile(
    rf"(?P<repo>{HUB_REPO_PATTERN.strip('^$')})(@(?P<revision>[A-Za-z0-9][\w.-]{{0,99}})|:latest)?",
    re.ASCII,
)
_MAX_HUB_NAME = 300
_NOTHING = "Nothing is deployed that you may use; `fleetctl apply` a ModelDeployment."
# Refusals of access control. No message contains a key or a part of one.
_CHALLENGE = ((b"www-authenticate", b'Bearer realm="mlx-fleet"'),)
_HOW = "send it as `Authorization: Bearer KEY` (or as `x-api-key` or `api-key`)"
_MAKE = "`fleetctl create apikey NAME` makes one"


def unknown_model(
    name: str, known: Sequence[str], nearest: str | None, idle: Collection[str] = ()
) -> Refusal:
    """Return the refusal of a model name that is not declared. `idle`: those without a ready replica."""
    message = f"The model '{_shortened(name)}' does not exist. "
    if nearest is not None:
        message += f"Did you mean '{nearest}'? "
    if known:
        names = [f"{name} (0 ready)" if name in idle else name for name in known]
        message += f"This fleet serves: {_listed(names)}."
    else:
        message += _NOTHING
    message += _hub_hint(name, known)
    return Refusal(status=404, message=message, param="model", code="model_not_found")


def no_model(known: Sequence[str]) -> Refusal:
    """Return the refusal of a request that names no model, where none is the default."""
    message = "The request names no model, and the gateway has no default. "
    if known:
        message += f'Send "model" with one of: {_listed(known)}; or start the gateway with --default-model NAME.'
    else:
        message += _NOTHING
    return Refusal(status=400, message=message, param="model", code="model_required")


def _listed(names: Sequence[str]) -> str:
    """Return the names as a list that a person reads."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shortened(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}..."


def _hub_hint(name: str, known: Sequence[str]) -> str:
    """Return how to deploy a name that is a repository of a hub; empty for other names."""
    found = _HUB_NAME.fullmatch(name) if len(name) <= _MAX_HUB_NAME else None
    if found is None:
        return ""
    repo, revision = found["repo"], found["revision"]
    if revision is None:
        return f" `fleetctl run {repo}` deploys this repository of the hub."
    if repo in known:
        return f" A model's name has no revision: ask for '{repo}', whose deployment chooses it."
    return f" `fleetctl create md NAME --hub {repo} --revision {revision}` deploys this repository of the hub."


def no_websocket() -> Refusal:
    """Return the refusal of a handshake that is none."""
    message = (
        "A WebSocket needs sec-websocket-version 13, a sec-websocket-key of 24 characters, and no message before the "
        "answer."
    )
    return Refusal(status=400, message=message, code="no_websocket")


def too_many_on_socket(limit: int) -> Refusal:
    """Return the refusal of one request too many on a WebSocket."""
    message = (
        f"{limit} requests run on this WebSocket, or the gateway stops; open another connection."
    )
    return Refusal(status=429, message=message, code="too_many_requests")


def wrong_idempotency_key(longest: int) -> Refusal:
    """Return the refusal of an idempotency key that is empty or too long."""
    message = f"'Idempotency-Key' has 1 to {longest} characters."
    return Refusal(status=400, message=message, param="Idempotency-Key")


def idempotency_key_reused() -> Refusal:
    """Return the refusal of an idempotency key that came with another body before."""
    message = "This 'Idempotency-Key' was sent with another body; use a new key for a new request."
    return Refusal(status=409, message=message, code="idempotency_key_reused")


def idempotency_key_in_use() -> Refusal:
    """Return the refusal of an idempotency key whose request is running."""
    message = "A request with this 'Idempotency-Key' is running; repeat this one to get its answer."
    return Refusal(status=409, message=message, code="idempotency_key_in_use", retry_after_s=1)


def no_batches() -> Refusal:
    """Return the refusal of files and batches at a gateway that keeps none."""
    message = (
        "This gateway keeps no files and batches: it has no --state-dir FOLDER, or cannot use the folder, and its log "
        "says why. Correct that, or send them to a gateway of the fleet that keeps them."
    )
    return Refusal(status=501, message=message, code="no_batches")


def batches_failed(why: str) -> Refusal:
    """Return the refusal when the folder of batches cannot be used."""
    message = f"The gateway's folder of files and batches cannot be used: {why[:300]}."
    return Refusal(status=503, message=message, code="batches_failed", retry_after_s=10)


def no_room_for_files(why: str) -> Refusal:
    """Return the refusal of a file for which there is no room."""
    message = f"{why}; delete files that are no longer needed (`DELETE /v1/files/ID`)."
    return Refusal(status=507, message=message, code="no_room")


def too_many_uploads() -> Refusal:
    """Return the refusal of a second upload at once."""
    message = (
        "A file of this client is being uploaded already; repeat the request when it has ended."
    )
    return Refusal(status=429, message=message, code="too_many_uploads", retry_after_s=5)


def too_many_batches(limit: int) -> Refusal:
    """Return the refusal of one open batch too many of a key."""
    message = f"{limit} batches of this key are not over; wait for one, or cancel one."
    return Refusal(status=429, message=message, code="too_many_batches", retry_after_s=60)


def not_synced() -> Refusal:
    """Return the refusal before the first read of the store."""
    message = "The gateway has not reached etcd since it started, so it knows no models yet."
    return Refusal(status=503, message=message, code="not_synced", retry_after_s=2)


def unreachable(name: str, attempts: int, why: str) -> Refusal:
    """Return the refusal when no engine of the model accepted a connection."""
    message = f"No replica of '{name}' could be reached ({attempts} tried; the last: {why})."
    return Refusal(status=503, message=message, code="upstream_unreachable", retry_after_s=1)


def upstream_failed(name: str, attempts: int, why: str) -> Refusal:
    """Return the refusal when engines accepted the request and failed to answer it."""
    message = f"The replicas of '{name}' failed ({attempts} tried; the last: {why})."
    return Refusal(status=503, message=message, code="upstream_failed", retry_after_s=1)


def upstream_silent(name: str, why: str) -> Refusal:
    """Return the refusal when an engine sent nothing for too long."""
    message = (
        f"The replica of '{name}' made no progress in time: {why}. The limits are "
        "spec.routing.timeouts.attempt and firstToken, or --request-timeout of the gateway."
    )
    return Refusal(status=504, message=message, code="upstream_timeout")


def shutting_down() -> Refusal:
    """Return the refusal for requests that outlast the gateway's drain."""
    message = "The gateway is shutting down; repeat the request."
    return Refusal(status=503, message=message, code="gateway_shutting_down", retry_after_s=1)


def internal() -> Refusal:
    """Return the refusal for an error of the gateway; the log has the details."""
    message = (
        "An internal error of the gateway: the request was not answered. Its log has the details."
    )
    return Refusal(status=500, message=message, code="internal_error")


def interrupted(why: str) -> Refusal:
    """Return the error that ends a stream after its status was sent."""
    message = f"The stream was interrupted: {why}."
    return Refusal(status=502, message=message, code="stream_interrupted")


def head_too_large(limit: int) -> Refusal:
    """Return the refusal of request headers over the limit."""
    message = f"The request's headers are larger than {limit} bytes."
    return Refusal(status=431, message=message, code="headers_too_large")


def too_many_headers(limit: int) -> Refusal:
    """Return the refusal of a request with too many headers."""
    message = f"The request has more than {limit} headers."
    return Refusal(status=431, message=message, code="headers_too_large")


def not_http() -> Refusal:
    """Return the refusal of bytes that are not HTTP/1.1."""
    message = "This is not a valid HTTP/1.1 request; the connection is closed."
    return Refusal(status=400, message=message, code="invalid_http")


def https_required() -> Refusal:
    """Return the refusal of plain HTTP on a port for HTTPS."""
    message = "This port serves HTTPS, and the request is plain HTTP: use https:// in the address."
    return Refusal(status=400, message=message, code="https_required")


def metrics_denied(status: int, message: str) -> Refusal:
    """Return the refusal of metrics to another machine."""
    extra = _CHALLENGE if status == 401 else ()
    return Refusal(status=status, message=message, code="metrics_denied", extra_headers=extra)


def wrong_origin(origin: str) -> Refusal:
    """Return the refusal of a web page whose origin is not allowed."""
    message = (
        f"Web pages from {origin[:200]} may not use this gateway; its operator can allow them with "
        f"--cors-origin {origin[:200]}."
    )
    return Refusal(status=403, message=message, code="origin_not_allowed")


def wrong_host(host: str) -> Refusal:
    """Return the refusal of a request to another host name than the gateway's own."""
    name = host[:200]
    message = (
        f"This gateway requires no key, so it answers only to the names of this machine, and not to '{name}': a web "
        "page that has its own name point here could use it. Use http://localhost or http://127.0.0.1; or the "
        f"gateway's operator can allow the name with --allowed-host {_host_name(name)}, or require keys with --auth on."
    )
    return Refusal(status=403, message=message, code="host_not_allowed")


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host


def unknown_transfer_coding(codings: str) -> Refusal:
    """Return the refusal of a transfer coding other than chunked."""
    message = (
        f"The transfer coding '{codings[:100]}' is not supported; send the body with 'content-length' or with "
        "'transfer-encoding: chunked' alone."
    )
    return Refusal(status=501, message=message, code="unknown_transfer_coding")


def too_many_bodies(limit: int, share: int) -> Refusal:
    """Return the refusal of a body for whose bytes there is no memory. `share`: the most of one API key."""
    message = (
        f"This gateway has no memory for another large request: the bodies of all requests may take {limit} "
        f"bytes (--max-body-memory), and those of one API key {share}; repeat it when others have ended."
    )
    return Refusal(status=503, message=message, code="gateway_overloaded", retry_after_s=1)


def too_many_connections() -> Refusal:
    """Return the refusal of a connection for which no file descriptor is left."""
    message = (
        "This gateway has as many connections as its limit of open files allows; repeat the request in a "
        "second. Its operator can raise the limit (ulimit -n)."
    )
    return Refusal(status=503, message=message, code="gateway_overloaded", retry_after_s=1)


def too_many_of_address(limit: int) -> Refusal:
    """Return the refusal of a connection of an address that has as many as one may have."""
    message = (
        f"This address has {limit} connections to this gateway already, the limit of "
        "--max-connections-per-address; use them, or close some."
    )
    return Refusal(status=503, message=message, code="too_many_connections", retry_after_s=1)


def compressed(coding: str) -> Refusal:
    """Return the refusal of a compressed body."""
    message = (
        f"The body is compressed ('content-encoding: {coding[:50]}'), which is not supported; "
        "send it uncompressed and without that header."
    )
    return Refusal(status=415, message=message, code="body_compressed")


def too_slow(seconds: float) -> Refusal:
    """Return the refusal of a request that arrives too slowly."""
    message = f"The request did not arrive within {seconds:g} s."
    return Refusal(status=408, message=message, code="body_timeout")


def request_timeout(name: str, timeout_s: float, attempts: int) -> Refusal:
    """Return the refusal when the request's deadline has passed."""
    tried = f"{attempts} replicas were tried" if attempts != 1 else "1 replica was tried"
    message = (
        f"The response of '{name}' was not complete within {timeout_s:g} s ({tried}); allow more time in the "
        f"header '{headers.REQUEST_TIMEOUT}', or in spec.routing.timeouts.request if that is the limit."
    )
    return Refusal(status=504, message=message, code="request_timeout")


def queue_full(name: str, *, running: int, waiting: int, retry_after_s: int) -> Refusal:
    """Return the refusal when the queue is full."""
    message = (
        f"The queue of '{name}' is full: {running} {_requests(running)} running and {waiting} "
        f"{_requests(waiting)} waiting, the limits of spec.routing.queueing; try again in {retry_after_s} s."
    )
    return Refusal(status=429, message=message, code="queue_full", retry_after_s=retry_after_s)


def _requests(count: int) -> str:
    return "request" if count == 1 else "requests"


def queue_timeout(name: str, waited_s: float, retry_after_s: int) -> Refusal:
    """Return the refusal of a request that waited too long for a slot."""
    message = (
        f"The request waited {waited_s:g} s for a slot of '{name}', the limit of "
        f"spec.routing.queueing.timeout; try again in {retry_after_s} s."
    )
    return Refusal(status=503, message=message, code="queue_timeout", retry_after_s=retry_after_s)


def not_retried(refusal: Refusal) -> Refusal:
    """Return the last refusal, with the note that the retry budget is used up."""
    message = (
        f"{refusal.message} No other replica was tried: too many requests fail at the moment, and retrying all of "
        "them would make it worse (spec.routing.retries.budget)."
    )
    return replace(refusal, message=message, retry_after_s=refusal.retry_after_s or 1)


def engine_refusal(status: int, body: bytes) -> Refusal:
    """Return an engine's error as a refusal, for a response whose status was sent already."""
    error = ErrorBody.parse(body)
    if error is None:
        error = ErrorBody(
            message=f"The replica answered a request for a stream with status {status}.",
            type=None,
            code=None,
        )
    return Refusal(status=status, message=error.message, code=error.code)


def no_key(is_any: bool) -> RefusedError:  # noqa: FBT001 - a callback
    """Return the refusal of a request without a key. `is_any`: the fleet has keys."""
    if is_any:
        message = f"This gateway requires an API key: {_HOW}. Ask the operator of the fleet for one; {_MAKE}."
    else:
        message = (
            f"This gateway requires an API key, and the fleet has none yet: {_MAKE}, then {_HOW}. A gateway "
            "that listens only on loopback, or was started with --auth off, requires none."
        )
    return _unauthorized(message)


def no_scheme() -> RefusedError:
    """Return the refusal of an `authorization` header without `Bearer`."""
    message = (
        "The header `authorization` does not begin with `Bearer `: send it as `Authorization: Bearer KEY`, "
        "or the key alone as `x-api-key` or `api-key`."
    )
    return _unauthorized(message)


def wrong_key(*, is_any: bool) -> RefusedError:
    """Return the refusal of an unknown or revoked key."""
    also = "" if is_any else " The fleet has no keys yet."
    message = (
        "The API key is unknown: it was mistyped or revoked, or belongs to another fleet."
        f"{also} `fleetctl get apikeys` lists the fleet's keys; {_MAKE}."
    )
    return _unauthorized(message)


def expired(key: str, at: datetime) -> RefusedError:
    """Return the refusal of an expired key."""
    message = f"The API key '{key}' expired on {at:%Y-%m-%d %H:%M} UTC; {_MAKE}."
    return _unauthorized(message, "api_key_expired")


def replaced(key: str, at: datetime) -> RefusedError:
    """Return the refusal of an earlier secret of a rotated key after its overlap."""
    message = (
        f"The API key '{key}' was rotated, and this earlier secret of it ended on {at:%Y-%m-%d %H:%M} UTC: use the new "
        f"one. If it is lost, `fleetctl rotate apikey {key}` makes another."
    )
    return _unauthorized(message, "api_key_expired")


def keys_unknown() -> RefusedError:
    """Return the refusal before the keys were read from the store."""
    message = (
        "The fleet's API keys could not be read from etcd yet, so no key can be checked. Try again when etcd answers. "
        "If it does, the etcd user of this process may lack the right to read them: run `fleetctl init-auth` again."
    )
    return unavailable(message, "not_synced", retry_after_s=2)


def wrong_model(key: str, allowed: Iterable[str], name: str) -> RefusedError:
    """Return the refusal of a model outside the key's list; it does not tell whether the model exists."""
    listed = _listed(sorted(allowed))
    message = (
        f"The API key '{key}' may not use the model '{_shortened(name)}'; it may use: {listed}."
    )
    refusal = Refusal(status=403, message=message, param="model", code="model_not_allowed")
    return RefusedError(refusal)


def role_required(key: str, role: Role, needed: Role) -> RefusedError:
    """Return the refusal of a route for keys of a lower role."""
    message = (
        f"The API key '{key}' has the role {role}, and this needs the role {needed}; `fleetctl create apikey NAME "
        f"--role {needed}` makes a key that has it."
    )
    return refused(403, message, "role_required")


def key_required(needed: Role) -> RefusedError:
    """Return the refusal of a route that changes something, for other machines and without a key."""
    message = (
        f"This needs the role {needed}. Without keys only clients on the gateway's own machine have it: start the "
        f"gateway with --auth on, and use a key of `fleetctl create apikey NAME --role {needed}`."
    )
    return refused(403, message, "role_required")


def too_many_at_once(subject: str, of: str, in_flight: int) -> Refusal:
    """Return the refusal of a request over a concurrency. `subject`: "The API key 'ci'"; `of`: " for the model 'm'"."""
    message = (
        f"{subject} has {in_flight} {_requests(in_flight)} in progress{of} at this gateway, the limit; "
        "repeat the request when one has ended."
    )
    return _rate_limited(message, 1.0)


def too_many_requests(subject: str, of: str, per_minute: float, wait_s: float) -> Refusal:
    """Return the refusal of a request over a rate of requests."""
    message = (
        f"{subject} has used up the requests{of} for now (at this gateway "
        f"{per_minute:.6g} per minute); repeat the request in {math.ceil(wait_s)} s."
    )
    return _rate_limited(message, wait_s)


def too_many_tokens(subject: str, of: str, per_minute: float, wait_s: float) -> Refusal:
    """Return the refusal of a request over a rate of tokens."""
    message = (
        f"{subject} has used up the tokens{of} for now (at this gateway "
        f"{per_minute:.6g} per minute, prompts and answers); repeat the request in "
        f"{math.ceil(wait_s)} s."
    )
    return _rate_limited(message, wait_s)


def _rate_limited(message: str, wait_s: float) -> Refusal:
    retry_after_s = max(1, math.ceil(wait_s))
    return Refusal(
        status=429, message=message, code="rate_limit_exceeded", retry_after_s=retry_after_s
    )


def _unauthorized(message: str, code: str = "invalid_api_key") -> RefusedError:
    refusal = Refusal(status=401, message=message, code=code, extra_headers=_CHALLENGE)
    return RefusedError(refusal)
