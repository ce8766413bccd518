"""Requests for repositories that no object declares, and that a ModelPolicy lets clients ask for.

A gateway decides about the owner, the role of the key and the rate. Everything else is decided by the leading reconciler,
which reads the requested names from `/metrics/demand`, and whose refusals are in the status of the policy.
"""

import asyncio
import re
from collections import OrderedDict, deque
from typing import Final

from gateway.auth.keyring import Principal
from gateway.forwarding import model_refusals
from machinery.clock import Clock
from machinery.prometheus import Gauge
from schemas.deployment import HUB_REPO_PATTERN
from schemas.modelpolicy import ModelPolicy, ModelPolicyStatus, policy_for
from schemas.records import role_includes
from schemas.wire import metrics as wire_metrics
from schemas.wire.errors import Refusal, RefusedError
from store import codec, keys
from store.informer import Informer
from store.port import Transport

_REPOSITORY: Final = re.compile(HUB_REPO_PATTERN)
# Longer than the interval at which the reconciler reads the metrics.
_ASKED_S: Final = 30.0
MAX_REQUESTED: Final = 64
"""Repositories that may be asked for at once; a further one is refused."""
_MAX_CLIENTS: Final = 4096
_HOUR_S: Final = 3600.0


class OnDemandModels:
    """The policies, and the repositories that clients ask for. Run `run()` in a task group."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._clock = clock
        self._asked_until_s: dict[str, float] = {}
        self._times: OrderedDict[str, deque[float]] = OrderedDict()
        """Times of requests for new repositories, by key; "" stands for all clients without one."""
        self._policies: Informer[ModelPolicy] = Informer(
            transport,
            keys.spec_prefix("ModelPolicy"),
            lambda item: codec.decode(ModelPolicy, item),
            clock,
        )
        self._statuses: Informer[ModelPolicyStatus] = Informer(
            transport,
            keys.status_prefix("ModelPolicy"),
            lambda item: codec.decode(ModelPolicyStatus, item),
            clock,
        )

    async def run(self) -> None:
        """Keep the policies current, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._policies.run())
            group.create_task(self._statuses.run())

    def policies(self) -> list[ModelPolicy]:
        """Return the policies that are known."""
        return list(self._policies.items.values())

    def ask(self, principal: Principal | None, name: str) -> bool:
        """Ask the reconciler to deploy a repository; return False if policies say nothing about such a name.

        Raises:
            RefusedError: the owner, the role or the rate of the key is not allowed, or the reconciler refused.

        """
        if not self._policies.items or not _REPOSITORY.fullmatch(name):
            return False
        policy = policy_for(self.policies(), name)
        if policy is None:
            owners = {owner for one in self.policies() for owner in one.spec.on_demand.owners}
            raise RefusedError(model_refusals.owner_not_allowed(name, sorted(owners)))
        rules = policy.spec.on_demand
        role = "user" if principal is None else principal.role
        if not role_includes(role, rules.role):
            raise RefusedError(model_refusals.role_too_low(policy.name, name, role, rules.role))
        if (refusal := self.refusal(name)) is not None:
            raise RefusedError(refusal)
        if not self.is_asked(name):
            self._admit(principal, name, rules.new_models_per_hour)
        self.renew(name)
        return True

    def is_asked(self, name: str) -> bool:
        """Return whether clients ask for the repository now."""
        return self._asked_until_s.get(name, 0.0) > self._clock.monotonic()

    def renew(self, name: str) -> None:
        """Note that a request still waits for the repository."""
        self._asked_until_s[name] = self._clock.monotonic() + _ASKED_S

    def refusal(self, name: str) -> Refusal | None:
        """Return the reconciler's refusal of the repository; None if there is none, or its policy changed since."""
        policy = policy_for(self.policies(), name)
        if policy is None:
            return None
        status = self._statuses.items.get(keys.status_key("ModelPolicy", policy.name))
        if status is None or status.observed_generation != policy.metadata.generation:
            return None
        refused = next((one for one in status.refusals if one.repo == name), None)
        if refused is None:
            return None
        return model_refusals.not_allowed(policy.name, name, refused.message)

    def requested(self) -> dict[str, int]:
        """Return the repositories that clients ask for, for `/metrics/demand`."""
        now_s = self._clock.monotonic()
        self._asked_until_s = {
            name: until_s for name, until_s in self._asked_until_s.items() if until_s > now_s
        }
        return dict.fromkeys(self._asked_until_s, 1)

    def gauge(self) -> Gauge:
        """Return the metric by which the reconciler learns what clients ask for."""
        return Gauge(
            wire_metrics.ON_DEMAND,
            "1 for each repository of a hub that clients ask for, and that nothing declares.",
            self.requested,
            labels=(wire_metrics.REPOSITORY_LABEL,),
        )

    def _admit(self, principal: Principal | None, name: str, per_hour: int) -> None:
        """Count a new repository for its key. Raises RefusedError."""
        now_s = self._clock.monotonic()
        if len(self.requested()) >= MAX_REQUESTED:
            raise RefusedError(model_refusals.too_many_new(name, _ASKED_S))
        identity = "" if principal is None else principal.identity
        times = self._times.pop(identity, deque())
        self._times[identity] = times
        if len(self._times) > _MAX_CLIENTS:
            self._times.popitem(last=False)
        while times and times[0] <= now_s - _HOUR_S:
            times.popleft()
        if len(times) >= per_hour:
            raise RefusedError(model_refusals.too_many_new(name, times[0] + _HOUR_S - now_s))
        times.append(now_s)
