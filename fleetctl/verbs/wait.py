"""`fleetctl wait`: waits until objects reach a condition or field value, exist, or are gone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import parse_timeout, timeout_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.objects import reader, selectors, targets, wait_conditions
from fleetctl.objects.targets import Selection
from fleetctl.objects.wait_conditions import CreatedGoal, DeletedGoal, Goal
from machinery.clock import Clock, SystemClock
from manifests.suggestions import not_found_message
from schemas.kinds import Kind
from store import object_trees
from store.errors import UnavailableError
from store.object_trees import Tree
from store.port import StoreReader, Transport

_POLL_S = 0.1
# Rest for this many times the duration of a read: reading many objects takes long.
_REST_FACTOR = 4
# A wait that takes longer says what it waits for.
_QUIET_S = 3.0
# From this many objects on, one list of the kind is cheaper than single reads.
_MIN_FOR_LIST = 5
# Kinds whose state does not come from the reconciler: agents report nodes, and nothing reports on keys.
_UNLED_KINDS = frozenset(("ApiKey", "Event", "Node"))
_HELP = """Wait until objects reach the state of --for.

\b
  fleetctl wait md/qwen --for=condition=Available --timeout=5m
  fleetctl wait nodes --all --for=condition=Ready
  fleetctl wait md/qwen --for=jsonpath='{.status.readyReplicas}'=2
  fleetctl wait replicas -l team=a --for=delete
"""


@dataclass(frozen=True, slots=True, order=True)
class AwaitedObject:
    """An object to wait for."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.kind.lower()}/{self.name}"


@click.command(help=_HELP)
@click.argument("what", nargs=-1, metavar="KIND NAME... | KIND/NAME... | KIND")
@click.option(
    "--for",
    "goal",
    required=True,
    help="State to wait for: condition=TYPE[=True|False|Unknown], jsonpath='{PATH}'[=VALUE], create, or delete.",
)
@timeout_option(
    "30s", "Time limit for all objects, such as 90s or 5m. 0 checks once, -1s waits for a week."
)
@arguments.selector_option
@arguments.all_option
@arguments.files_option
@arguments.recursive_option
@with_store
async def wait(transport: Transport, what: tuple[str, ...], goal: str, **options: Any) -> None:
    """Wait until objects reach the state of --for."""
    target, timeout_s = wait_conditions.parse(goal), parse_timeout(options["timeout"])
    chosen = targets.parse_selections(
        what, options, verb="waited for", is_all=options["is_all"], is_read=True
    )
    waiter = ObjectWaiter(transport, SystemClock(), target, timeout_s)
    awaited = [obj for choice in chosen for obj in await waiter.meant(choice)]
    if awaited:
        await waiter.until(awaited, {choice.kind.name: choice.kind for choice in chosen})
    elif not isinstance(target, DeletedGoal):
        plurals = ", ".join(choice.kind.plural for choice in chosen)
        raise FleetctlError(f"no matching {plurals} found to wait for")


class _WaitNotes:
    """Shows what a wait is for: on a terminal in a progress line, else after some seconds and for each new reason."""

    def __init__(self, progress: ProgressLine, clock: Clock) -> None:
        self._progress = progress
        self._clock = clock
        self._quiet_until_s = clock.monotonic() + _QUIET_S
        self._said: set[str] = set()

    def update(self, text: str, reason: str) -> None:
        """Show the text. Only reasons are compared, because a message may have a count."""
        self._progress.show(text)
        is_quiet = self._progress.is_shown or self._clock.monotonic() < self._quiet_until_s
        if not is_quiet and reason not in self._said:
            self._said.add(reason)
            self._progress.say(text)


class ObjectWaiter:
    """Reads objects repeatedly until they reach the goal or the time is over; outages of the store are waited through."""

    def __init__(self, store: StoreReader, clock: Clock, goal: Goal, timeout_s: float) -> None:
        self._store = store
        self._clock = clock
        self._goal = goal
        self._timeout_s = timeout_s
        self._deadline_s = clock.monotonic() + timeout_s
        self._look_s = 0.0

    async def meant(self, choice: Selection) -> list[AwaitedObject]:
        """Return the selected objects; with the goal `create`, wait until one exists."""
        if choice.names:
            return [AwaitedObject(choice.kind.name, name) for name in choice.names]
        while True:
            found = selectors.select(await self._all(choice.kind), choice.requirements)
            if found or not isinstance(self._goal, CreatedGoal) or not await self._has_time():
                names = map(object_trees.name_of, found)
                return [AwaitedObject(choice.kind.name, name) for name in names]

    async def until(self, awaited: Sequence[AwaitedObject], kinds: dict[str, Kind]) -> None:
        """Wait for all objects, and print each that reaches the goal.

        Raises:
            FleetctlError: an object does not exist, or the time is over; the message has the current state.

        """
        objects = list(dict.fromkeys(awaited))
        with ProgressLine() as progress:
            notes = _WaitNotes(progress, self._clock)
            while True:
                seen = await self._looked(objects)
                if not isinstance(self._goal, CreatedGoal | DeletedGoal):
                    await self._refuse_missing(seen, kinds)
                for obj in [*objects]:
                    if wait_conditions.is_met(self._goal, seen[obj]):
                        progress.clear()
                        click.echo(f"{obj.label} {wait_conditions.met_text(self._goal)}")
                        objects.remove(obj)
                if not objects:
                    return
                first = seen[objects[0]]
                why = await self._leader_text(objects)
                reason = f"{wait_conditions.reason(self._goal, first)}{why}"
                notes.update(f"{self._so_far(objects, first)}{why}", reason)
                if not await self._has_time():
                    lines = [self._too_late(obj, seen[obj], why) for obj in objects]
                    raise FleetctlError("\n".join(lines))

    def _so_far(self, left: Sequence[AwaitedObject], tree: Tree | None) -> str:
        """Return the progress line, about the first remaining object."""
        others = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return f"{left[0].label}{others}: waiting for {self._goal.text}{wait_conditions.state_text(self._goal, tree)}"

    async def _leader_text(self, left: Sequence[AwaitedObject]) -> str:
        """Return that no reconciler leads, as the end of a sentence, if the goal needs one."""
        if isinstance(self._goal, CreatedGoal) or all(obj.kind in _UNLED_KINDS for obj in left):
            return ""
        try:
            why = await reader.reconciler_problem(self._store)
        except UnavailableError:
            return ""
        return f"; {why}" if why else ""

    async def _looked(self, left: Sequence[AwaitedObject]) -> dict[AwaitedObject, Tree | None]:
        """Read the objects."""
        trees: dict[AwaitedObject, Tree | None] = {}
        while True:
            began_s = self._clock.monotonic()
            try:
                for kind in dict.fromkeys(obj.kind for obj in left):
                    of_kind = [obj for obj in left if obj.kind == kind]
                    if len(of_kind) < _MIN_FOR_LIST:
                        for obj in of_kind:
                            trees[obj] = await object_trees.get(self._store, kind, obj.name)
                        continue
                    every = await object_trees.list_all(self._store, kind)
                    by_name = {object_trees.name_of(tree): tree for tree in every}
                    trees |= {obj: by_name.get(obj.name) for obj in of_kind}
            except UnavailableError:
                if not await self._has_time():
                    raise
                continue
            self._look_s = self._clock.monotonic() - began_s
            return trees

    async def _all(self, kind: Kind) -> list[Tree]:
        while True:
            try:
                return await object_trees.list_all(self._store, kind.name)
            except UnavailableError:
                if not await self._has_time():
                    raise

    async def _has_time(self) -> bool:
        """Rest before the next read; return whether there is time for one."""
        left_s = self._deadline_s - self._clock.monotonic()
        if left_s <= 0:
            return False
        await self._clock.sleep(min(left_s, max(_POLL_S, _REST_FACTOR * self._look_s)))
        return True

    async def _refuse_missing(
        self, seen: dict[AwaitedObject, Tree | None], kinds: dict[str, Kind]
    ) -> None:
        """Raise FleetctlError for an object that does not exist."""
        for obj, tree in seen.items():
            if tree is None:
                kind = kinds[obj.kind]
                known = [object_trees.name_of(other) for other in await self._all(kind)]
                raise FleetctlError(not_found_message(kind, obj.name, known))

    def _too_late(self, one: AwaitedObject, tree: Tree | None, leader_text: str) -> str:
        now = wait_conditions.state_text(self._goal, tree)
        why = "" if one.kind in _UNLED_KINDS else leader_text
        # An object that does not exist cannot be described.
        more = (
            f"describe {one.label}` shows details" if tree else f"get {one.kind.lower()}` lists all"
        )
        return (
            f"timed out after {self._timeout_s:g} s waiting for {self._goal.text} of {one.label}{now}{why}. "
            f"`fleetctl {more}"
        )
