"""`fleetctl wait`: until a condition holds, or an object is gone."""

import re
from dataclasses import dataclass
from typing import Any

import click

from fleetctl import reader
from fleetctl.connect import opened, run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.kinds import one_of
from machinery.clock import SystemClock
from schemas.kinds import Kind
from schemas.meta import ApiObject, Truth, find_condition
from store.errors import UnavailableError

_LOOK_S = 0.1
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is waited for: a condition, or that the object is gone."""

    condition: str = ""
    truth: Truth = Truth.TRUE

    @property
    def text(self) -> str:
        return f"condition {self.condition}={self.truth}" if self.condition else "deletion"


def parse_goal(text: str) -> Goal:
    """Return what `--for` asks.

    Raises:
        click.UsageError: it asks nothing that can be waited for.

    """
    if text == "delete":
        return Goal()
    found = re.fullmatch(r"condition=([A-Za-z]+)(?:=(true|false|unknown))?", text, re.IGNORECASE)
    if found is None:
        raise click.UsageError(
            f"--for={text}: write condition=Available, condition=Available=False, or delete"
        )
    return Goal(condition=found[1], truth=Truth((found[2] or "true").capitalize()))


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


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="KIND NAME | KIND/NAME")
@click.option("--for", "goal", required=True, help="condition=TYPE[=True|False], or delete.")
@click.option("--timeout", default="30s", show_default=True, help="How long, such as 90s or 5m.")
@store_options
def wait(what: tuple[str, ...], goal: str, timeout: str, **options: Any) -> None:
    """Wait until a condition of an object holds, or until it is gone."""
    kind, name = one_of(what)
    run(_wait(kind, name, parse_goal(goal), parse_duration(timeout), options))
    done = "deleted" if goal == "delete" else "condition met"
    click.echo(f"{kind.name.lower()}/{name} {done}")


async def _wait(
    kind: Kind, name: str, goal: Goal, timeout_s: float, options: dict[str, Any]
) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s
    async with opened(options) as transport:
        while True:
            try:
                obj = await reader.read_one(transport, kind, name)
            except UnavailableError:
                # A store that restarts meanwhile is part of what is waited through.
                if clock.monotonic() >= deadline:
                    raise
                await clock.sleep(_LOOK_S)
                continue
            if obj is None and goal.condition:
                known = [o.name for o in await reader.read(transport, kind, ())]
                raise FleetctlError(reader.not_found(kind, name, known))
            if _holds(obj, goal):
                return
            if clock.monotonic() >= deadline:
                raise FleetctlError(_too_late(kind, name, goal, obj, timeout_s))
            await clock.sleep(_LOOK_S)


def _holds(obj: ApiObject | None, goal: Goal) -> bool:
    if obj is None or not goal.condition:
        return obj is None and not goal.condition
    status = getattr(obj, "status", None)
    found = find_condition(status.conditions, goal.condition) if status is not None else None
    # A status that speaks of an older spec says nothing about this one.
    current = found is not None and found.observed_generation >= obj.metadata.generation
    return found is not None and current and found.status is goal.truth


def _too_late(kind: Kind, name: str, goal: Goal, obj: ApiObject | None, timeout_s: float) -> str:
    status = getattr(obj, "status", None)
    found = find_condition(status.conditions, goal.condition) if status is not None else None
    if found is not None:
        now = f"; it is {found.status} ({found.reason}: {found.message})"
    else:
        known = ", ".join(c.type for c in status.conditions) if status is not None else ""
        now = f"; it has no such condition, but {known}" if known and goal.condition else ""
    return (
        f"timed out after {timeout_s:g} s waiting for {goal.text} of {kind.name.lower()}/{name}{now}. "
        f"`fleetctl describe {kind.name.lower()}/{name}` says more"
    )
