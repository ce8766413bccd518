"""Clients that read and compare-and-swap a few registers, and record what they did and got.

Every value is written once, so a register's value stands for its version. What the recording alone
cannot say is asserted here: a value never has two versions, nor a version two values.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence

from machinery.clock import Clock
from store.errors import ConflictError, UnavailableError
from store.port import ModRevisionGuard, Put, Transport
from tests.support.linear import NEVER, Action, Call, Read, Swap, Value, check


class Recording:
    """Records the histories of some registers."""

    def __init__(self, corner: str, registers: int, clock: Clock) -> None:
        self._keys = [f"{corner}{n}" for n in range(registers)]
        self._clock = clock
        self._versions: dict[tuple[str, int], Value] = {}
        self.histories: dict[str, list[Call]] = defaultdict(list)
        self.is_over = False

    @property
    def calls(self) -> int:
        return sum(len(history) for history in self.histories.values())

    async def client(self, name: str, transport: Transport, dice: random.Random) -> None:
        """Do random operations until the recording ends."""
        seen: dict[str, tuple[Value, int]] = dict.fromkeys(self._keys, (None, 0))
        number = 0
        while not self.is_over:
            key = dice.choice(self._keys)
            number += 1
            if dice.random() < 0.4:
                await self._read(name, transport, key, seen)
            else:
                await self._swap(name, transport, key, seen, f"{name}.{number}")
            await self._clock.sleep(dice.uniform(0, 0.02))

    async def _read(
        self, name: str, transport: Transport, key: str, seen: dict[str, tuple[Value, int]]
    ) -> None:
        invoked_at = self._clock.monotonic()
        try:
            item = await transport.get(key)
        except UnavailableError:
            return
        value = item.value.decode() if item is not None else None
        self._note(name, key, invoked_at, Read(value=value))
        seen[key] = (value, item.mod_revision if item is not None else 0)
        self._is_version(key, *seen[key])

    async def _swap(
        self,
        name: str,
        transport: Transport,
        key: str,
        seen: dict[str, tuple[Value, int]],
        value: str,
    ) -> None:
        expected, version = seen[key]
        invoked_at = self._clock.monotonic()
        swapped: bool | None = True
        try:
            guard = ModRevisionGuard(key=key, mod_revision=version)
            revision = await transport.commit([guard], [Put(key=key, value=value.encode())])
            seen[key] = (value, revision)
            self._is_version(key, *seen[key])
        except ConflictError:
            swapped = False
        except UnavailableError as error:
            if not error.ambiguous:
                return
            swapped = None
        self._note(name, key, invoked_at, Swap(expected=expected, value=value, swapped=swapped))

    def _note(self, who: str, key: str, invoked_at: float, action: Action) -> None:
        unknown = isinstance(action, Swap) and action.swapped is None
        returned_at = NEVER if unknown else self._clock.monotonic()
        call = Call(who=who, action=action, invoked_at=invoked_at, returned_at=returned_at)
        self.histories[key].append(call)

    def _is_version(self, key: str, value: Value, version: int) -> None:
        if version:
            assert self._versions.setdefault((key, version), value) == value, (key, version)

    async def run(self, transports: Sequence[Transport], clients: int) -> None:
        """Run the clients until the recording ends."""
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                transport = transports[number % len(transports)]
                group.create_task(self.client(f"c{number}", transport, random.Random(number)))

    def judge(self) -> None:
        """Check that every register's history is linearizable and long enough to mean something."""
        calls = [call for history in self.histories.values() for call in history]
        swaps = [c.action for c in calls if isinstance(c.action, Swap)]
        assert {True, False} <= {swap.swapped for swap in swaps}
        for key, history in self.histories.items():
            verdict = check(history)
            assert verdict, f"{key}: no order explains {verdict.stuck}"
        values = list(self._versions.values())
        assert len(values) == len(set(values)), "a value has two versions"
