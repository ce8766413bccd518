"""Models on demand: creates a ModelDeployment for each requested repository that a ModelPolicy allows, and deletes unused ones.

Gateways only report which repositories clients ask for (`/metrics/demand`), as they report the demand for deployments.
The leader decides, by the policy and by what the hub says of the repository.
"""

import asyncio
import json
import logging
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from machinery.clock import Clock
from machinery.control_loop import Requeue, WorkQueue
from manifests import apply as manifests_apply
from manifests import delete as deleting
from manifests.apply import ApplyOptions
from manifests.change_log import AuditedTransport, ChangeAuthor
from manifests.errors import ApplyError, InUseError, ManifestErrors, NotFoundError
from manifests.load import parse_texts, read_objects
from models.hub.hub_settings import HubFactory, HubSettings
from models.hub.remote_inspection import RepositoryFacts, describe_repository
from reconciler.deployments.demand.scraper import DemandScraper
from reconciler.deployments.execute import Executor
from reconciler.leader_loop import run_as_leader
from reconciler.listers.caches import wait_for_revision
from reconciler.listers.lister import Lister
from reconciler.services.hub_grants import token_for
from reconciler.services.model_lookup import LOOKUP_ERRORS, reason_of
from schemas import duration, quantity
from schemas.deployment import HubReference, ModelDeployment
from schemas.event import ObjectReference
from schemas.meta import ApiObject, ObjectKey
from schemas.modelpolicy import (
    MAX_REFUSALS,
    ON_DEMAND_LABEL,
    ModelPolicy,
    ModelPolicyStatus,
    OnDemand,
    OnDemandRefusal,
    on_demand_name,
    policy_for,
)
from store import keys
from store.events import EventRecorder
from store.leases import Leadership
from store.port import Transport

log = logging.getLogger(__name__)

_PERIOD_S: Final = 1.0
_SWEEP_S: Final = 30.0
_LOOKUP_S: Final = 60.0
# A hub that is slow delays three other repositories at most.
_AT_ONCE: Final = 4
_REFUSED_FOR: Final = timedelta(minutes=10)
# Of what passes by itself: a hub that is away, models that are deleted.
_REFUSED_FOR_NOW: Final = timedelta(seconds=30)
_PASSING: Final = frozenset({"SourceUnreachable", "RateLimited", "TooManyModels", "TooManyBytes"})
# The key of the queue that stands for the sweep; no repository is called so.
_SWEEP: Final = ""
_MAX_MESSAGE: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUsage:
    """The models that exist by a policy."""

    models: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Denial:
    """The reason why a policy does not allow a repository."""

    reason: str
    message: str


def judge(rules: OnDemand, facts: RepositoryFacts, usage: PolicyUsage) -> Denial | None:
    """Return why the rules do not allow a repository of an allowed owner; None if they do. Pure."""
    size = quantity.show(facts.size_bytes)
    if facts.size_bytes > quantity.parse(rules.max_size):
        return Denial("TooLarge", f"its files have {size}, and maxSize is {rules.max_size}")
    if not set(facts.licenses) & set(rules.licenses):
        named, allowed = ", ".join(facts.licenses) or "none", ", ".join(rules.licenses)
        message = f"its card names the licence {named}, and the policy allows {allowed}"
        return Denial("LicenseNotAllowed", message)
    until = f"a model that is unused for {rules.unused_for} is deleted"
    if usage.models >= rules.max_models:
        message = f"{usage.models} models are deployed on demand, and maxModels is {rules.max_models}; {until}"
        return Denial("TooManyModels", message)
    if usage.total_bytes + facts.size_bytes > quantity.parse(rules.max_total_size):
        used = quantity.show(usage.total_bytes)
        message = (
            f"its files have {size}, those of other models on demand {used}, and maxTotalSize is "
        )
        return Denial("TooManyBytes", f"{message}{rules.max_total_size}; {until}")
    return None


def manifest_of(policy: ModelPolicy, repo: str, commit: str) -> dict[str, object]:
    """Return the manifest of the ModelDeployment: the judged commit, at zero, with a label for its policy. Pure."""
    rules = policy.spec.on_demand
    placement = {"placement": {"pools": list(rules.pools)}} if rules.pools else {}
    return {
        "apiVersion": "fleet/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": on_demand_name(repo), "labels": {ON_DEMAND_LABEL: policy.name}},
        "spec": {
            "model": {"hub": {"repo": repo, "revision": commit}},
            "replicas": 0,
            "contextLength": rules.context_length,
            "autoscaling": {"minReplicas": 0, "maxReplicas": 1, "idleTime": rules.idle_time},
            **placement,
        },
    }


@dataclass(slots=True, kw_only=True)
class OnDemandController:
    """Decides about requested repositories, and deletes unused models. Made anew by each leader; call `run()` once."""

    leadership: Leadership
    transport: Transport
    """Its writes must be refused once another process leads."""
    lister: Lister
    recorder: EventRecorder
    executor: Executor
    gateways: DemandScraper
    hubs: HubSettings
    clock: Clock
    _deciding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the count of what exists to the write of one more, and while a status is written."""
    _sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the files of models that this leader deployed, until the hub's listing is in the store."""
    _used: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By deployment, the requests that had ended at its last use, and the time of that."""

    async def run(self) -> None:
        """Decide about repositories, and delete unused models, forever.

        Raises:
            AuthorityLostError: this process leads no longer (in an exception group).

        """
        queue: WorkQueue[str] = WorkQueue(self.clock)
        queue.add(_SWEEP)
        async with self.hubs.open() as factory, asyncio.TaskGroup() as group:

            async def reconcile(key: str) -> Requeue | None:
                if key != _SWEEP:
                    await self._decide(key, factory)
                    return None
                await self._sweep()
                return Requeue(after_s=_SWEEP_S)

            group.create_task(run_as_leader(queue, reconcile, self.leadership, workers=_AT_ONCE))
            while True:
                for repo in self.gateways.requested():
                    if self._undecided_policy(repo) is not None:
                        queue.add(repo)
                await self.clock.sleep(_PERIOD_S)

    def _undecided_policy(self, repo: str) -> ModelPolicy | None:
        """Return the policy that must decide about a repository; None if nothing is to be decided now."""
        policy = policy_for(self.lister.policies(), repo)
        if policy is None or self.lister.declared(on_demand_name(repo)) is not None:
            return None
        refused = {refusal.repo for refusal in self._refusals(policy)}
        return None if repo in refused else policy

    def _refusals(self, policy: ModelPolicy) -> tuple[OnDemandRefusal, ...]:
        """Return the refusals that hold: those of the policy as it is now, for a while."""
        status = self.lister.status(ObjectKey("ModelPolicy", policy.name))
        if not isinstance(status, ModelPolicyStatus):
            return ()
        if status.observed_generation != policy.metadata.generation:
            return ()
        now = self.clock.now()
        return tuple(
            refusal
            for refusal in status.refusals
            if now - refusal.at < (_REFUSED_FOR_NOW if refusal.reason in _PASSING else _REFUSED_FOR)
        )

    def _deployments_of(self, policy: ModelPolicy) -> list[ModelDeployment]:
        return [
            deployment
            for deployment in self.lister.declared_deployments()
            if deployment.metadata.labels.get(ON_DEMAND_LABEL) == policy.name
        ]

    def _usage(self, policy: ModelPolicy) -> PolicyUsage:
        names = [deployment.name for deployment in self._deployments_of(policy)]
        snapshots = {name: self.lister.snapshot(name) for name in names}
        sizes = (
            snapshot.size_bytes if snapshot is not None else self._sizes.get(name, 0)
            for name, snapshot in snapshots.items()
        )
        return PolicyUsage(models=len(names), total_bytes=sum(sizes))

    async def _decide(self, repo: str, factory: HubFactory) -> None:
        """Deploy a repository, or refuse it, by its policy."""
        policy = self._undecided_policy(repo)
        if policy is None:
            return
        try:
            source = HubReference(repo=repo)
            token = await token_for(self.transport, self.hubs.endpoint_of(source))
            async with asyncio.timeout(_LOOKUP_S):
                facts = await describe_repository(factory(source, token), repo, source.revision)
        except LOOKUP_ERRORS as error:
            async with self._deciding:
                await self._refuse(policy, repo, Denial(*reason_of(error)))
            return
        async with self._deciding:
            denial = judge(policy.spec.on_demand, facts, self._usage(policy))
            if denial is None:
                denial = await self._deploy(policy, repo, facts)
            if denial is not None:
                await self._refuse(policy, repo, denial)

    async def _deploy(
        self, policy: ModelPolicy, repo: str, facts: RepositoryFacts
    ) -> Denial | None:
        """Write the ModelDeployment of a repository, and wait until the caches show it; return why it cannot be written."""
        name, manager = on_demand_name(repo), manager_of(policy.name)
        text = json.dumps(manifest_of(policy, repo, facts.commit))
        author = ChangeAuthor(
            user=manager, manager="reconciler", reason=f"a client asked for {repo}"
        )
        try:
            loaded = read_objects(parse_texts([(manager, text)]).documents)
            await manifests_apply.apply(
                AuditedTransport(self.transport, self.clock, author),
                loaded,
                self.clock,
                ApplyOptions(manager=manager),
            )
        except (ApplyError, ManifestErrors) as error:
            return Denial("ApplyFailed", str(error))
        self._sizes[name] = facts.size_bytes
        item = await self.transport.get(keys.spec_key("ModelDeployment", name))
        if item is not None:
            await wait_for_revision(self.lister.caches.specs, item.mod_revision)
        message = f"a client asked for {repo}: ModelDeployment {name} was created"
        await self.recorder.record(_about(policy), "DeployedOnDemand", message)
        await self._write_status(policy, self._refusals(policy))
        return None

    async def _refuse(self, policy: ModelPolicy, repo: str, denial: Denial) -> None:
        refusal = OnDemandRefusal(
            repo=repo,
            reason=denial.reason,
            message=denial.message[:_MAX_MESSAGE],
            at=self.clock.now(),
        )
        await self._write_status(policy, (refusal, *self._refusals(policy)))
        message = f"{repo} is not deployed on demand: {refusal.message}"
        await self.recorder.record(_about(policy), denial.reason, message, type_="Warning")

    async def _write_status(
        self, policy: ModelPolicy, refusals: tuple[OnDemandRefusal, ...]
    ) -> None:
        key, usage = ObjectKey("ModelPolicy", policy.name), self._usage(policy)
        new = ModelPolicyStatus(
            observed_generation=policy.metadata.generation,
            models=usage.models,
            total_bytes=usage.total_bytes,
            refusals=refusals[:MAX_REFUSALS],
        )
        if new == self.lister.status(key) or self.lister.is_newer(key):
            return
        revision = await self.executor.write_status(key, new, version=self.lister.spec_version(key))
        await wait_for_revision(self.lister.caches.statuses, revision)

    async def _sweep(self) -> None:
        """Delete unused models and those of removed policies; drop refusals that are over."""
        policies = {policy.name: policy for policy in self.lister.policies()}
        for deployment in self.lister.declared_deployments():
            policy_name = deployment.metadata.labels.get(ON_DEMAND_LABEL)
            if policy_name is None or deployment.metadata.deletion_timestamp is not None:
                continue
            policy = policies.get(policy_name)
            if policy is None:
                await self._delete(deployment, f"ModelPolicy {policy_name} is gone")
            elif self._is_unused(deployment.name, policy.spec.on_demand):
                unused_for = policy.spec.on_demand.unused_for
                await self._delete(deployment, f"it was unused for {unused_for}")
        for policy in policies.values():
            async with self._deciding:
                await self._write_status(policy, self._refusals(policy))

    def _is_unused(self, name: str, rules: OnDemand) -> bool:
        """Return whether no request named the model for the policy's time, as far as this leader knows."""
        demand, now_s = self.gateways.demand(name), self.clock.monotonic()
        finished, used_s = self._used.get(name, (-1, now_s))
        if (
            demand is None
            or not demand.is_complete
            or demand.requests
            or demand.finished != finished
        ):
            self._used[name] = (finished if demand is None else demand.finished, now_s)
            return False
        return now_s - used_s >= duration.parse(rules.unused_for)

    async def _delete(self, deployment: ModelDeployment, why: str) -> None:
        author = ChangeAuthor(user="reconciler", manager="reconciler", reason=why)
        audited = AuditedTransport(self.transport, self.clock, author)

        def is_same(obj: ApiObject) -> bool:
            return obj.metadata.uid == deployment.metadata.uid

        try:
            await deleting.delete(
                audited, "ModelDeployment", deployment.name, self.clock, only_if=is_same
            )
        except NotFoundError:
            return
        except InUseError as error:  # a route names it: a person wants it now
            log.info(
                "unused model is kept", extra={"deployment": deployment.name, "why": str(error)}
            )
            return
        self._sizes.pop(deployment.name, None)
        self._used.pop(deployment.name, None)
        about = ObjectReference(
            kind="ModelDeployment", name=deployment.name, uid=deployment.metadata.uid
        )
        await self.recorder.record(about, "DeletedUnused", why)


def manager_of(policy: str) -> str:
    """Return the field manager of the ModelDeployments of a policy."""
    return f"modelpolicy/{policy}"


def _about(policy: ModelPolicy) -> ObjectReference:
    return ObjectReference(kind="ModelPolicy", name=policy.name, uid=policy.metadata.uid)
