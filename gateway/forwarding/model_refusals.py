"""Refusals of requests for models that do not serve: none is ready, it starts, slots are taken, a policy forbids it."""

import math
from collections.abc import Sequence

from schemas.records import Role
from schemas.wire.errors import Refusal

# Long enough to load a small model.
_NOT_READY_RETRY_S = 5
# Of a model that is fetched first, the rest of the time is a guess.
_LONGEST_RETRY_S = 600
_OWNERS_SHOWN = 10


def nothing_ready(name: str, reason: str) -> Refusal:
    """Return the refusal for a declared model without a ready replica."""
    return Refusal(
        status=503,
        message=f"No replica of '{name}' is ready. {reason}",
        code="model_not_ready",
        retry_after_s=_NOT_READY_RETRY_S,
    )


def model_starting(name: str, waited_s: float, reason: str, wait_s: float) -> Refusal:
    """Return the refusal for a model that is scaling up from zero and is not ready in time.

    `wait_s`: the seconds in which it is expected; 0 if that is not known.
    """
    when = f" in {_retry_s(wait_s)} s" if wait_s else ""
    return Refusal(
        status=503,
        message=f"The model '{name}' is starting and was not ready within {waited_s:g} s; repeat the "
        f"request{when}. {reason}",
        code="model_starting",
        retry_after_s=_retry_s(wait_s),
    )


def _retry_s(wait_s: float) -> int:
    """Return the seconds for `Retry-After` of a model that is expected in so many, 0 if that is not known."""
    return min(_LONGEST_RETRY_S, math.ceil(wait_s)) or _NOT_READY_RETRY_S


def too_many_waiting(name: str, limit: int, wait_s: float) -> Refusal:
    """Return the refusal when the maximum number of requests already waits for the model; `wait_s`: as above."""
    return Refusal(
        status=429,
        message=f"{limit} requests wait for a replica of '{name}' already, the limit of --hold-limit; repeat the "
        "request later.",
        code="model_starting",
        retry_after_s=_retry_s(wait_s),
    )


def all_busy(name: str, waited_s: float) -> Refusal:
    """Return the refusal of a request that waited in vain for a slot of an engine."""
    message = (
        f"All replicas of '{name}' are busy, and the request waited {waited_s:g} s for a free slot; repeat it "
        "later. The limit is --hold-timeout of the gateway, or spec.routing.queueing.coldStart."
    )
    return Refusal(status=429, message=message, code="queue_full", retry_after_s=_NOT_READY_RETRY_S)


def owner_not_allowed(name: str, owners: Sequence[str]) -> Refusal:
    """Return the refusal of a repository whose owner no ModelPolicy names."""
    listed = ", ".join(owners[:_OWNERS_SHOWN]) + (" and more" if owners[_OWNERS_SHOWN:] else "")
    owner = name.partition("/")[0]
    message = (
        f"The model '{name}' does not exist, and no ModelPolicy allows models of '{owner}' on demand. Allowed owners are "
        f"{listed}. `fleetctl run {name}` deploys it, if you may write to the fleet."
    )
    return Refusal(status=404, message=message, param="model", code="model_not_found")


def role_too_low(policy: str, name: str, role: Role, needed: Role) -> Refusal:
    """Return the refusal of a key that may not ask for new models."""
    message = (
        f"The model '{name}' is not deployed, and ModelPolicy {policy} lets keys with the role {needed} ask for new models; "
        f"this one has the role {role}."
    )
    return Refusal(status=403, message=message, param="model", code="model_not_allowed")


def not_allowed(policy: str, name: str, why: str) -> Refusal:
    """Return the refusal of a repository that the reconciler did not deploy; `why` is its message."""
    message = f"The model '{name}' is not deployed on demand by ModelPolicy {policy}: {why}."
    return Refusal(status=403, message=message, param="model", code="model_not_allowed")


def too_many_new(name: str, wait_s: float) -> Refusal:
    """Return the refusal of one new model too many for a key, or for the gateway."""
    message = (
        f"The model '{name}' is not deployed, and too many new models were asked for: the limit is newModelsPerHour of the "
        "ModelPolicy for each API key. Ask for a model that is deployed, or repeat the request later."
    )
    return Refusal(
        status=429, message=message, code="too_many_new_models", retry_after_s=math.ceil(wait_s)
    )
