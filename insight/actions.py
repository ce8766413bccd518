"""Actions on one object that people take: prepared first, with what would be written, then carried out by compare-and-swap.

action = Action(verb="scale", name="qwen", replicas=3)
prepared = await prepare(transport, clock, action)      # writes nothing
await carry_out(transport, prepared)                    # only if the object is as it was
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, get_args

from insight import edits, rollouts
from insight.edits import ObjectEdit
from machinery.clock import Clock
from manifests import delete as deleting
from manifests import diff, ownership
from schemas.deployment import ModelDeployment, Revision
from schemas.gitsource import GitSource, with_sync_request
from schemas.meta import FOREGROUND, ApiObject, ObjectKey, ObjectMeta
from schemas.model_snapshot import pinned
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
_NODE_VERBS: Final = frozenset({"cordon", "uncordon", "drain", "taint", "untaint"})


def _edit(
    manager: str | None, done: str, edit: Callable[[Any], ApiObject | None]
) -> ObjectEdit[Any]:
    return ObjectEdit(edit=edit, manager=manager, done=done, unchanged=f"already {done}")


EDITS: Final[Mapping[str, ObjectEdit[Any]]] = MappingProxyType(
    {
        "cordon": _edit(edits.CORDON_MANAGER, "cordoned", edits.as_cordoned),
        "uncordon": _edit(edits.CORDON_MANAGER, "uncordoned", edits.as_uncordoned),
        "drain": _edit(edits.CORDON_MANAGER, "cordoned", edits.as_draining),
        "suspend": _edit(
            edits.SUSPEND_MANAGER, "suspended", partial(edits.with_spec, suspend=True)
        ),
        "unsuspend": _edit(
            edits.SUSPEND_MANAGER, "resumed", partial(edits.with_spec, suspend=False)
        ),
        "pause": _edit(ownership.ROLLOUT, "paused", edits.as_paused),
        "resume": _edit(ownership.ROLLOUT, "resumed", edits.as_resumed),
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
        return Node if self.verb in _NODE_VERBS else ModelDeployment

    @property
    def command(self) -> str:
        """The command that does the same."""
        name = self.name
        revision = f" --to-revision {self.revision}" if self.revision else ""
        words = {
            "taint": f"taint {name} {self._taint_word}",
            "untaint": f"taint {name} {self._taint_word}",
            "scale": f"scale md/{name} --replicas={self.replicas}",
            "delete": f"delete md/{name}",
            "sync": f"sync gs/{name}",
            "suspend": f"suspend gs/{name}",
            "unsuspend": f"resume gs/{name}",
            **{verb: f"{verb} {name}" for verb in ("cordon", "uncordon", "drain")},
        }
        return f"fleetctl {words.get(self.verb, f'rollout {self.verb} {name}{revision}')}"

    @property
    def _taint_word(self) -> str:
        if self.taint is None:
            return "KEY=VALUE:EFFECT"
        if self.verb == "untaint":
            return f"{self.taint.key}:{self.taint.effect}-"
        return edits.taint_text(self.taint)


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
    obj: ApiObject | None
    if action.kind is Node:
        obj = await _read_node(transport, clock, action.name)
    else:
        obj = await objects.get(transport, action.kind, action.name)
    if obj is None:
        raise NotFoundError(f"there is no {action.kind.__name__} {action.name}")
    if action.verb == "delete":
        edits.refuse_deleted(obj)
        await deleting.check_unused(transport, ObjectKey(obj.kind, obj.name))
    edit = await edit_of(transport, clock, obj, action)
    return PreparedAction(action=action, before=obj, after=edit.applied(obj, clock.now()))


async def edit_of(transport: Transport, clock: Clock, obj: Any, action: Action) -> ObjectEdit[Any]:
    """Return the edit that carries out the action on this object, read with its status.

    Raises:
        EditRefusedError: the action makes no sense for the object; the message says why.
        StoreError: the store does not answer.

    """
    now = clock.now()
    match action.verb:
        case "taint" | "untaint":
            if action.taint is None:
                raise EditRefusedError(f"{action.verb} needs a taint: a key, a value, an effect")
            is_removal = action.verb == "untaint"
            edit = partial(
                edits.with_taints,
                added=() if is_removal else (action.taint,),
                removed=((action.taint.key, action.taint.effect),) if is_removal else (),
                overwrite=True,
            )
            change = _edit(edits.TAINT_MANAGER, "tainted", edit)
        case "sync":
            if obj.spec.suspend:
                raise EditRefusedError(f"gitsource/{obj.name} is suspended; resume it first")
            request = partial(with_sync_request, request_id=secrets.token_hex(4))
            change = _edit(edits.SUSPEND_MANAGER, "requested", request)
        case "scale":
            if action.replicas is None:
                raise EditRefusedError("scale needs a number of replicas")
            change = scale(action.replicas)
        case "delete":
            # A mark is no field that a manager owns.
            change = _edit(
                None,
                "deleted",
                lambda current: deleting.with_deletion_mark(current, now, FOREGROUND),
            )
        case "restart":
            change = _edit(ownership.ROLLOUT, "restarted", partial(edits.as_restarted, now=now))
        case "promote" | "abort":
            decision: CanaryDecision = action.verb
            edits.check_canary_runs(obj, decision)
            generation = obj.metadata.generation
            decide = partial(edits.with_canary_decision, decision=decision, generation=generation)
            change = _edit(ownership.ROLLOUT, f"{decision.removesuffix('e')}ed", decide)
        case "undo":
            change = await _undo(transport, obj, action.revision)
        case _:
            change = EDITS[action.verb]
    return change


def scale(replicas: int, current: int | None = None) -> ObjectEdit[ModelDeployment]:
    """Return the edit that sets the number of replicas; it refuses another number than `current` before."""
    edit = partial(edits.with_replicas, replicas=replicas, current=current)
    return ObjectEdit(
        edit=edit, manager=edits.SCALE_MANAGER, done="scaled", unchanged="scaled (no change)"
    )


async def _undo(
    transport: Transport, obj: ModelDeployment, number: int | None
) -> ObjectEdit[ModelDeployment]:
    """Return the edit that rolls back to a revision; None: the one before."""
    revisions, status = await rollouts.read_revisions(transport, obj), obj.status
    snapshot = await rollouts.read_snapshot(transport, obj.name)
    served = "" if status is None else status.stable_template

    def target(deployment: ModelDeployment) -> Revision:
        return edits.rollback_target(revisions, deployment, number=number, served=served)

    def roll_back(current: ModelDeployment) -> ModelDeployment | None:
        deployment = current if snapshot is None else pinned(current, snapshot)
        return edits.with_revision(deployment, target(deployment), revisions[-1])

    revision = target(obj if snapshot is None else pinned(obj, snapshot)).spec.revision
    canary = None if status is None else status.canary
    is_trial = canary is not None and canary.outcome == "Running"
    return ObjectEdit(
        edit=roll_back,
        manager=ownership.ROLLOUT,
        done="rolled back, and its canary ended" if is_trial else "rolled back",
        unchanged=f"skipped rollback (current template already matches revision {revision})",
    )


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
