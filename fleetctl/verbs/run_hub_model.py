"""The deployment that `fleetctl run ORGANISATION/NAME` writes, and the wait until its model is fetched and serves."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.objects import reader
from fleetctl.objects.kind_args import kind_of
from fleetctl.objects.writer import create_all
from fleetctl.verbs.create_flags import build_manifest, read_object
from machinery.clock import Clock, SystemClock
from manifests.errors import ManifestErrors
from manifests.trees import Tree
from schemas.deployment import HUB_REPO_PATTERN, ModelDeployment, served_names
from schemas.meta import Condition, find_condition, is_true, object_name
from schemas.replica import MODEL_PRESENT, FetchStatus, Replica
from store import objects
from store.port import Transport

_POLL_S: Final = 0.2
_MANAGER: Final = "fleetctl"
_BAR_WIDTH: Final = 24
# Nothing changes by itself: a person must act.
_HOPELESS: Final = frozenset(
    {"NotFound", "Gated", "Unauthorized", "ListingRefused", "ModelUnusable", "NoSpace"}
)
# Something elsewhere must change, which nobody may be about to do.
_LASTING: Final = frozenset({"SourceUnreachable", "RateLimited", "Unschedulable"})
# A token takes a moment to reach the Mac, and a Mac may join a moment later.
_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProgress:
    """State of a deployment on its way to serving, and what keeps it."""

    reason: str
    message: str
    is_available: bool = False
    fetch: FetchStatus | None = None
    """The fetch that runs, if that is what keeps it."""


def is_hub_id(model: str) -> bool:
    """Return whether a model's name can be a repository: ORGANISATION/NAME."""
    return re.fullmatch(HUB_REPO_PATTERN, model) is not None


async def deploy_and_wait(repo: str, options: dict[str, Any]) -> None:
    """Deploy a repository unless it is deployed, and wait until one replica serves it.

    Raises:
        FleetctlError: the deployment's name is taken, or the model cannot be fetched or placed.

    """
    clock = SystemClock()
    async with open_store(options) as transport:
        with ProgressLine() as progress:
            name = await deploy_repository(
                transport, repo, clock, progress, source=options["source"]
            )
            await wait_until_serving(transport, repo, name, clock, progress)


async def deploy_repository(
    transport: Transport,
    repo: str,
    clock: Clock,
    progress: ProgressLine,
    *,
    source: str | None = None,
) -> str:
    """Return the name of the deployment of a repository, which is created if there is none.

    Raises:
        FleetctlError: the deployment's name is taken by another model.

    """
    existing = await reader.read(transport, kind_of("md"), ())
    for api_object in existing:
        if isinstance(api_object, ModelDeployment) and repo in served_names(api_object):
            return api_object.name
    name = object_name(repo, "model")
    if any(api_object.name == name for api_object in existing):
        raise FleetctlError(
            f"modeldeployment/{name} exists and has another model. Choose a name yourself: "
            f"fleetctl create modeldeployment NAME --hub {repo}"
        )
    hub: dict[str, Tree] = {"repo": repo, **({"source": source} if source else {})}
    tree = build_manifest("ModelDeployment", name, {"model": {"hub": hub}}, {})
    loaded = read_object(tree, {"spec.model.hub.repo": "MODEL"})
    try:
        await create_all(
            transport,
            [loaded],
            clock,
            manager=_MANAGER,
            report=lambda obj: progress.say(f"modeldeployment/{obj.name} created"),
        )
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was created:\n{error}") from error
    return name


async def wait_until_serving(
    transport: Transport,
    repo: str,
    name: str,
    clock: Clock,
    progress: ProgressLine,
    *,
    patience_s: float = _PATIENCE_S,
) -> None:
    """Wait until one replica of the deployment serves, and show its progress.

    `patience_s`: how long a reason that only a person can mend may last.

    Raises:
        FleetctlError: a person must act first; the message has the reason.

    """
    said, hopeless_since, is_advised = "", float("inf"), False
    stays = f"The deployment stays; `fleetctl describe md/{name}` shows more, `fleetctl delete md/{name}` removes it"
    while True:
        found = await _look(transport, name)
        if found.is_available:
            return
        now = clock.monotonic()
        hopeless_since = min(hopeless_since, now) if found.reason in _HOPELESS else float("inf")
        if now - hopeless_since >= patience_s:
            raise FleetctlError(f"{repo} is not served ({found.reason}): {found.message}. {stays}")
        progress.show(progress_text(repo, found))
        if not progress.is_shown and found.reason != said:
            said = found.reason
            progress.say(f"{repo}: {found.reason}: {found.message}".rstrip(": "))
        if found.reason in _LASTING and not is_advised:
            is_advised = True
            progress.say(f"this may last. Ctrl-C ends the wait. {stays}")
        await clock.sleep(_POLL_S)


async def _look(transport: Transport, name: str) -> ServingProgress:
    deployment = await objects.get(transport, ModelDeployment, name)
    if deployment is None:
        raise FleetctlError(f"modeldeployment/{name} was deleted meanwhile")
    status = deployment.status
    if status is None or status.observed_generation < deployment.metadata.generation:
        why = await reader.reconciler_problem(transport)
        return ServingProgress(reason="Waiting", message=why or "the reconciler has not seen it")
    if status.ready_replicas > 0:
        return ServingProgress(reason="Ready", message="", is_available=True)
    replicas = [
        replica
        for replica in await objects.list_all(transport, Replica)
        if replica.spec.deployment == name and replica.metadata.deletion_timestamp is None
    ]
    return serving_progress(status.conditions, replicas)


def serving_progress(
    conditions: Sequence[Condition], replicas: Sequence[Replica]
) -> ServingProgress:
    """Return what keeps a deployment from serving: its own condition, or that of its first replica. Pure."""
    for replica in replicas:
        if replica.status is None:
            continue
        own = replica.status.conditions
        type_ = "Ready" if is_true(own, MODEL_PRESENT) else MODEL_PRESENT
        condition = find_condition(own, type_) or find_condition(own, "Ready")
        if condition is not None:
            return ServingProgress(
                reason=condition.reason,
                message=condition.message,
                fetch=min(replica.status.fetches, key=lambda one: one.percent, default=None),
            )
    available = find_condition(conditions, "Available")
    if available is None:
        return ServingProgress(reason="Waiting", message="the reconciler has not judged it")
    return ServingProgress(reason=available.reason, message=available.message)


def progress_text(repo: str, found: ServingProgress) -> str:
    """Return the line for a terminal, with a bar while bytes arrive. Pure."""
    fetch = found.fetch
    if fetch is None or fetch.phase != "Downloading":
        return f"{repo}: {found.reason}: {found.message}".rstrip(": ")
    filled = _BAR_WIDTH * min(100, fetch.percent) // 100
    bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
    return f"{repo} [{bar}] {fetch.text}"
