"""Actions on one object that people take: prepared first, with what would be written, then carried out by compare-and-swap.

action = Action(verb="scale", name="qwen", replicas=3)
prepared = await prepare(transport, clock, action)      # writes nothing
await carry_out(transport, prepared)                    # only if the object is as it was
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

from insight import edits, rollouts
from machinery.clock import Clock
from manifests import delete as deleting
from manifests import diff, ownership
from schemas.deployment import ModelDeployment
from schemas.gitsource import GitSource, with_sync_request
from schemas.meta import FOREGROUND, ApiObject, ObjectKey, ObjectMeta
from schemas.node import Node, NodeStatus, Taint
from schemas.rollout import CanaryDecision
from store import codec, keys, objects
from store.errors import ConflictError, EditRefusedError, NotFoundError
from store.port import Transport

Verb: TypeAlias = Literal[
    "cordon",
    "uncordon",
    "drain",
    "taint",
    "untaint",
    "scale",
    "pause",
    "resume",
    "restart",
    "undo",
    "promote",
    "abort",
    "delete",
    "sync",
    "suspend",
    "unsuspend",
]
VERBS: Final[tuple[Verb, ...]] = get_args(Verb)
_SOURCE_VERBS: Final = frozenset({"sync", "suspend", "unsuspend"})
_NODE_EDITS: Final[Mapping[str, Callable[[Node], Node | None]]] = MappingProxyType(
    {
        "cordon": edits.as_cordoned,
        "uncordon": edits.as_uncordoned,
        "drain": edits.as_draining,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action on a Mac, a deployment or a Git source."""

    verb: Verb
    name: str
    replicas: int | None = None
    """For scale."""
    revision: int | None = None
    """For undo: the revision to return to; None: the one before."""

    taint: Taint | None = None
    """For taint and untaint."""

    @property
    def kind(self) -> type[Node] | type[ModelDeployment] | type[GitSource]:
        """The kind of the object."""
        if self.verb in _SOURCE_VERBS:
            return GitSource
        return Node if self._is_of_node else ModelDeployment

    @property
    def _is_of_node(self) -> bool:
        return self.verb in _NODE_EDITS or self.verb in ("taint", "untaint")

    @property
    def command(self) -> str:
        """The command that does the same."""
        name, verb = self.name, self.verb
        revision = f" --to-revision {self.revision}" if self.revision else ""
        words = {
            "taint": f"taint {name} {self._taint_word}",
            "untaint": f"taint {name} {self._taint_word}",
            "scale": f"scale md/{name} --replicas={self.replicas}",
            "delete": f"delete md/{name}",
            "sync": f"sync gs/{name}",
            "suspend": f"suspend gs/{name}",
            "unsuspend": f"resume gs/{name}",
            **{one: f"{one} {name}" for one in _NODE_EDITS},
        }
        return f"fleetctl {words.get(verb, f'rollout {verb} {name}{revision}')}"

    @property
    def _taint_word(self) -> str:
        if self.taint is None:
            return "KEY=VALUE:EFFECT"
        if self.verb == "untaint":
            return f"{self.taint.key}:{self.taint.effect}-"
        value = f"={self.taint.value}" if self.taint.value else ""
        return f"{self.taint.key}{value}:{self.taint.effect}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAction:
    """An action, the object that it was prepared for, and what it would become."""

    action: Action
    before: ApiObject
    after: ApiObject | None
    """None if nothing changes."""

    @property
    def version(self) -> str:
        """The version of the object, which the action is for."""
        return self.before.metadata.resource_version or "0"

    @property
    def diff(self) -> str:
        """The change as a unified diff; empty if nothing changes."""
        return "" if self.after is None else diff.diff_text(self.before, self.after)


async def prepare(transport: Transport, clock: Clock, action: Action) -> PreparedAction:
    """Read the object, and return what the action would make of it.

    Raises:
        NotFoundError: the object does not exist.
        EditRefusedError: the action makes no sense for it; the message says why.
        StoreError: the store does not answer.

    """
    if action.kind is Node:
        node = await _read_node(transport, clock, action.name)
        return _prepared(action, node, *_edited_node(node, action), clock)
    if action.kind is GitSource:
        source = await objects.get(transport, GitSource, action.name)
        if source is None:
            raise NotFoundError(f"there is no GitSource {action.name}")
        return _prepared(
            action, source, _edited_source(source, action), edits.SUSPEND_MANAGER, clock
        )
    deployment = await objects.get(transport, ModelDeployment, action.name)
    if deployment is None:
        raise NotFoundError(f"there is no ModelDeployment {action.name}")
    edits.refuse_deleted(deployment)
    if action.verb == "delete":
        await deleting.check_unused(transport, ObjectKey("ModelDeployment", action.name))
        # A mark is no field that a manager owns.
        marked = deleting.with_deletion_mark(deployment, clock.now(), FOREGROUND)
        return PreparedAction(action=action, before=deployment, after=marked)
    if action.verb == "scale":
        if action.replicas is None:
            raise EditRefusedError("scale needs a number of replicas")
        changed: ApiObject | None = edits.with_replicas(deployment, action.replicas)
        return _prepared(action, deployment, changed, edits.SCALE_MANAGER, clock)
    changed = await _rolled(transport, clock, deployment, action)
    return _prepared(action, deployment, changed, ownership.ROLLOUT, clock)


def _edited_node(node: Node, action: Action) -> tuple[ApiObject | None, str]:
    """Return the node after the action, None if nothing changes, and the field manager."""
    if action.verb in _NODE_EDITS:
        return _NODE_EDITS[action.verb](node), edits.CORDON_MANAGER
    if action.taint is None:
        raise EditRefusedError(f"{action.verb} needs a taint: a key, a value, an effect")
    edit = edits.with_taint if action.verb == "taint" else edits.without_taint
    return edit(node, action.taint), edits.TAINT_MANAGER


def _edited_source(source: GitSource, action: Action) -> GitSource | None:
    """Return the Git source after the action; None if nothing changes."""
    if action.verb == "suspend":
        return edits.as_suspended(source)
    if action.verb == "unsuspend":
        return edits.as_unsuspended(source)
    if source.spec.suspend:
        raise EditRefusedError(f"gitsource/{source.name} is suspended; resume it first")
    return with_sync_request(source, secrets.token_hex(4))


async def _rolled(
    transport: Transport, clock: Clock, deployment: ModelDeployment, action: Action
) -> ModelDeployment | None:
    """Return the deployment after a verb of `fleetctl rollout`."""
    match action.verb:
        case "pause":
            return edits.as_paused(deployment)
        case "resume":
            return edits.as_resumed(deployment)
        case "restart":
            return edits.as_restarted(deployment, clock.now())
        case "undo":
            return await _undone(transport, deployment, action.revision)
        case "promote" | "abort":
            decision: CanaryDecision = action.verb
            edits.check_canary_runs(deployment, decision)
            generation = deployment.metadata.generation
            return edits.with_canary_decision(deployment, decision, generation)
        case _:
            raise EditRefusedError(f"{action.verb} is no action on a ModelDeployment")


async def _undone(
    transport: Transport, deployment: ModelDeployment, number: int | None
) -> ModelDeployment | None:
    revisions = await rollouts.read_revisions(transport, deployment)
    now = await rollouts.read_pinned(transport, deployment)
    served = "" if deployment.status is None else deployment.status.stable_template
    target = edits.rollback_target(revisions, now, number=number, served=served)
    return edits.with_revision(now, target, revisions[-1])


def _prepared(
    action: Action, before: ApiObject, changed: ApiObject | None, manager: str, clock: Clock
) -> PreparedAction:
    after = changed
    if changed is not None:
        after = ownership.record_update(before, changed, manager, clock.now())
    return PreparedAction(action=action, before=before, after=after)


async def _read_node(transport: Transport, clock: Clock, name: str) -> Node:
    """Return a node; one without a spec, known from its agent alone, as the reconciler would write it."""
    item = await transport.get(keys.spec_key("Node", name))
    if item is not None:
        return codec.decode_object(Node, item)
    status = await transport.get(keys.status_key("Node", name))
    if status is None:
        raise NotFoundError(f"there is no Mac {name}")
    uid, now = codec.decode(NodeStatus, status).uid, clock.now()
    return Node(metadata=ObjectMeta(name=name, uid=uid, generation=1, creation_timestamp=now))


async def carry_out(transport: Transport, prepared: PreparedAction, *, version: str) -> None:
    """Write a prepared action, if the object still has the version that a person has seen.

    Raises:
        ConflictError: the object was changed since.
        StoreError: the store does not answer.

    """
    if version != prepared.version:
        before = prepared.before
        raise ConflictError(f"{before.kind} {before.name} was changed since it was looked at")
    if prepared.after is not None:
        guard, put = codec.unchanged_guard(prepared.before), codec.put_spec(prepared.after)
        await transport.commit([guard], [put])
