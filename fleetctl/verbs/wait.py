"""`fleetctl wait`: until a condition or a field of objects is so, or they are there, or gone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.objects import selectors, targets, wait_conditions
from fleetctl.objects.targets import Selection
from fleetctl.objects.wait_conditions import CreatedGoal, DeletedGoal, Goal
from machinery.clock import Clock, SystemClock
from manifests.suggestions import not_found_message
from schemas.kinds import Kind
from store import object_trees
from store.errors import UnavailableError
from store.object_trees import Tree
from store.port import StoreReader

_POLL_S = 0.1
# Of many objects a look takes its time; so much of the time the store is left alone.
_REST_FACTOR = 4
# One list of a kind is cheaper than so many reads.
_MIN_FOR_LIST = 5
# kubectl's meaning of a negative --timeout.
_WEEK_S = 7 * 24 * 3600.0
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_HELP = """Wait until objects are as --for says.

\b
  fleetctl wait md/qwen --for=condition=Available --timeout=5m
  fleetctl wait nodes --all --for=condition=Ready
  fleetctl wait md/qwen --for=jsonpath='{.status.readyReplicas}'=2
  fleetctl wait replicas -l team=a --for=delete
"""


def parse_duration(text: str) -> float:
    """Return the seconds that "90", "30s", "5m" or "1h30m" say.

    Raises:
        click.UsageError: it is no length of time.

    """
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", text)
    if not parts or "".join(n + u for n, u in parts) != text:
        raise click.UsageError(f"{text!r} is no length of time; write 30s, 5m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def parse_timeout(text: str) -> float:
    """Return the seconds that --timeout says; a negative one is a week. Errors as `parse_duration`."""
    if not text.startswith("-"):
        return parse_duration(text)
    return _WEEK_S if parse_duration(text[1:]) else 0.0


@dataclass(frozen=True, slots=True, order=True)
class AwaitedObject:
    """One object that is waited for."""

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
    help="condition=TYPE[=True|False|Unknown], jsonpath='{PATH}'[=VALUE], create, or delete.",
)
@click.option(
    "--timeout",
    default="30s",
    show_default=True,
    help="How long for all of them, such as 90s or 5m; 0 looks once, -1s is a week.",
)
@targets.selector_option
@targets.all_option
@targets.files_option
@targets.recursive_option
@store_options
def wait(what: tuple[str, ...], goal: str, timeout: str, **options: Any) -> None:
    """Wait until objects are as --for says."""
    wanted, timeout_s = wait_conditions.parse(goal), parse_timeout(timeout)
    chosen = targets.parse_selections(
        what, options, verb="waited for", is_all=options["is_all"], is_read=True
    )
    run(_wait(chosen, wanted, timeout_s, options))


async def _wait(
    chosen: Sequence[Selection], goal: Goal, timeout_s: float, options: dict[str, Any]
) -> None:
    clock = SystemClock()
    async with open_store(options) as transport:
        watched = ObjectWaiter(transport, clock, goal, timeout_s)
        awaited = [one for choice in chosen for one in await watched.meant(choice)]
        if not awaited:
            if isinstance(goal, DeletedGoal):
                return
            plurals = ", ".join(choice.kind.plural for choice in chosen)
            raise FleetctlError(f"there are no such {plurals}, so nothing is waited for")
        await watched.until(awaited, {choice.kind.name: choice.kind for choice in chosen})


class ObjectWaiter:
    """Looks again and again, until all is well or the time is over. A store that restarts is waited through."""

    def __init__(self, store: StoreReader, clock: Clock, goal: Goal, timeout_s: float) -> None:
        self._store = store
        self._clock = clock
        self._goal = goal
        self._timeout_s = timeout_s
        self._deadline_s = clock.monotonic() + timeout_s
        self._look_s = 0.0

    async def meant(self, choice: Selection) -> list[AwaitedObject]:
        """Return the objects that a choice means; waits for one to be created if that is the goal."""
        if choice.names:
            return [AwaitedObject(choice.kind.name, name) for name in choice.names]
        while True:
            found = selectors.select(await self._all(choice.kind), choice.selector)
            if found or not isinstance(self._goal, CreatedGoal) or not await self._has_time():
                return [
                    AwaitedObject(choice.kind.name, object_trees.name_of(tree)) for tree in found
                ]

    async def until(self, awaited: Sequence[AwaitedObject], kinds: dict[str, Kind]) -> None:
        """Wait for all of them, in the order they were asked for.

        Raises:
            FleetctlError: one is not there, or the time is over; says how far those are.

        """
        left = list(dict.fromkeys(awaited))
        with ProgressLine() as progress:
            while True:
                seen = await self._looked(left)
                if not isinstance(self._goal, CreatedGoal | DeletedGoal):
                    await self._refuse_missing(seen, kinds)
                for one in [one for one in left if wait_conditions.is_met(self._goal, seen[one])]:
                    progress.clear()
                    click.echo(f"{one.label} {wait_conditions.met_text(self._goal)}")
                    left.remove(one)
                if not left:
                    return
                progress.show(self._so_far(left, seen[left[0]]))
                if not await self._has_time():
                    raise FleetctlError("\n".join(self._too_late(one, seen[one]) for one in left))

    def _so_far(self, left: Sequence[AwaitedObject], tree: Tree | None) -> str:
        """Return the line that a person sees meanwhile; it speaks of the first that is left."""
        others = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return f"{left[0].label}{others}: waiting for {self._goal.text}{wait_conditions.state_text(self._goal, tree)}"

    async def _looked(self, left: Sequence[AwaitedObject]) -> dict[AwaitedObject, Tree | None]:
        """Return the objects as they are."""
        found: dict[AwaitedObject, Tree | None] = {}
        while True:
            began_s = self._clock.monotonic()
            try:
                for kind in dict.fromkeys(one.kind for one in left):
                    found |= await self._of_kind(kind, [one for one in left if one.kind == kind])
            except UnavailableError:
                if not await self._has_time():
                    raise
                continue
            self._look_s = self._clock.monotonic() - began_s
            return found

    async def _of_kind(
        self, kind: str, left: Sequence[AwaitedObject]
    ) -> dict[AwaitedObject, Tree | None]:
        if len(left) < _MIN_FOR_LIST:
            return {one: await object_trees.get(self._store, kind, one.name) for one in left}
        trees = await object_trees.list_all(self._store, kind)
        by_name = {object_trees.name_of(tree): tree for tree in trees}
        return {one: by_name.get(one.name) for one in left}

    async def _all(self, kind: Kind) -> list[Tree]:
        while True:
            try:
                return await object_trees.list_all(self._store, kind.name)
            except UnavailableError:
                if not await self._has_time():
                    raise

    async def _has_time(self) -> bool:
        """Rest before the next look; return whether there is time for one."""
        left_s = self._deadline_s - self._clock.monotonic()
        if left_s <= 0:
            return False
        await self._clock.sleep(min(left_s, max(_POLL_S, _REST_FACTOR * self._look_s)))
        return True

    async def _refuse_missing(
        self, seen: dict[AwaitedObject, Tree | None], kinds: dict[str, Kind]
    ) -> None:
        """Raise FleetctlError for an object that is not there: it would be waited for in vain."""
        for one, tree in seen.items():
            if tree is None:
                known = [object_trees.name_of(t) for t in await self._all(kinds[one.kind])]
                raise FleetctlError(not_found_message(kinds[one.kind], one.name, known))

    def _too_late(self, one: AwaitedObject, tree: Tree | None) -> str:
        now = wait_conditions.state_text(self._goal, tree)
        # What is not there cannot be described.
        more = f"describe {one.label}` says more" if tree else f"get {one.kind.lower()}` shows all"
        return (
            f"timed out after {self._timeout_s:g} s waiting for {self._goal.text} of {one.label}{now}. "
            f"`fleetctl {more}"
        )
