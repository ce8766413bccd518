"""Adds machines to the fleet, several at a time: one line about each step, or one about each machine."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetctl.cli.errors import FleetctlError, from_store_error
from fleetctl.machines.fleet_access import FleetAccess
from fleetctl.machines.setup import STEPS, NodeSetup, SetupOptions
from fleetctl.remote.session import SshPolicy, connect
from fleetctl.remote.target import RemoteTarget, parse_target
from machinery.clock import Clock
from store.errors import StoreError

_AT_A_TIME: Final = 8
_MAX_HOSTS: Final = 1000

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one machine's setup."""

    target: RemoteTarget
    name: str = ""
    """Name of the node; "" if it was not found out."""
    changed: int = 0
    """Number of steps that changed something."""
    error: str = ""
    step: int = 0
    """Number of the step that failed, from 1."""

    @property
    def text(self) -> str:
        """One line for people."""
        if self.error:
            return f"{self.target.host}: step {self.step} of {len(STEPS)} ({STEPS[self.step - 1]}) failed: {self.error}"
        if not self.changed:
            return f"{self.target.host}: node/{self.name}: all {len(STEPS)} steps were done already"
        return f"{self.target.host}: node/{self.name} is Ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAdder:
    """Adds machines to one fleet."""

    fleet: FleetAccess
    policy: SshPolicy
    options: SetupOptions
    clock: Clock
    say: Say

    async def add_all(self, targets: Sequence[RemoteTarget]) -> list[Outcome]:
        """Add machines; each ends for itself. With several, one line about each is said."""
        is_single = len(targets) == 1
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def one(target: RemoteTarget) -> Outcome:
            async with limit:
                say = self.say if is_single else _silent
                done = await self.add(target, say)
            self.say(done.text)
            return done

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(target)) for target in targets]
        return [task.result() for task in tasks]

    async def add(self, target: RemoteTarget, say: Say) -> Outcome:
        """Add one machine, and say what each step does."""
        number, changed, setup = 1, 0, None
        try:
            async with connect(target, self.policy) as mac:
                _report(say, number, is_changed=False)
                setup = NodeSetup(
                    mac=mac,
                    fleet=self.fleet,
                    options=self.options,
                    clock=self.clock,
                    warn=lambda line: say(f"       {line}"),
                )
                for step in setup.steps():
                    number += 1
                    is_changed = await step()
                    changed += is_changed
                    _report(say, number, is_changed=is_changed)
        except (FleetctlError, StoreError, OSError) as error:
            name = "" if setup is None else setup.name
            return Outcome(
                target=target, name=name, changed=changed, error=_message(error), step=number
            )
        return Outcome(target=target, name=setup.name, changed=changed)


def _report(say: Say, number: int, *, is_changed: bool) -> None:
    say(f"{number:>2}/{len(STEPS)}  {STEPS[number - 1]}: {'done' if is_changed else 'ok'}")


def _message(error: Exception) -> str:
    if isinstance(error, StoreError):
        return from_store_error(error).message
    return error.message if isinstance(error, FleetctlError) else str(error)


def _silent(line: str) -> None:
    """Say nothing: the lines of several machines would mix."""


def read_hosts(path: Path) -> list[RemoteTarget]:
    """Return the machines in a file: one user@host a line; # begins a comment.

    Raises:
        FleetctlError: it cannot be read, or names too many.
        click.UsageError: a line is something else.

    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.readlines(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise FleetctlError(f"--hosts {path}: {error}") from error
    words = [line.partition("#")[0].strip() for line in lines]
    remote_targets = [parse_target(word) for word in words if word]
    if len(remote_targets) > _MAX_HOSTS:
        raise FleetctlError(f"--hosts {path}: more than {_MAX_HOSTS} machines")
    return remote_targets
