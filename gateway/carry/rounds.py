"""Whom to ask how it is: those that nobody has heard lately, or that somebody waits for. Pure; told the time.

Whoever answers requests is not asked: its answers say more. A thousand endpoints cost no more than RATE_PER_S.
"""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gateway.routing.table import Origin, Target

TICK_S = 0.5
RATE_PER_S = 20
# An engine sends nothing while it reads a prompt, which takes seconds; asking it then costs it next to nothing.
WAITED_S = 1.0
# How often the ejected are looked for, which is every time: who comes back is used again within a second.
_EJECTED_S = 0.4
_QUIET_S = 10.0


@dataclass(slots=True)
class Rounds:
    """When everybody was heard and asked last."""

    _targets: dict[Origin, Target] = field(default_factory=dict)
    _heard_s: dict[Origin, float] = field(default_factory=dict)
    _asked_s: dict[Origin, float] = field(default_factory=dict)
    _asking: set[Origin] = field(default_factory=set)

    def know(self, targets: Iterable[Target], now_s: float) -> None:
        """Learn who is there now. Who is new counts as heard: its agent has just asked it."""
        self._targets = {target.origin: target for target in targets}
        self._heard_s = {o: self._heard_s.get(o, now_s) for o in self._targets}
        self._asked_s = {o: s for o, s in self._asked_s.items() if o in self._targets}

    def hear(self, origins: Collection[Origin], now_s: float) -> None:
        """Note who said anything."""
        for origin in origins:
            if origin in self._heard_s:
                self._heard_s[origin] = now_s

    def heard_since(self, origin: Origin, then_s: float) -> bool:
        """Return whether it said anything after that."""
        return self._heard_s.get(origin, then_s) > then_s

    def due(
        self, now_s: float, *, awaited: AbstractSet[Origin], is_open: Callable[[Origin], bool]
    ) -> list[Target]:
        """Return who is to be asked now, the most urgent first; each is being asked until `done`.

        `awaited` are those from whom somebody has been waiting for `WAITED_S`.
        """
        urgent, quiet = [], []
        for origin, heard_s in self._heard_s.items():
            if origin in self._asking:
                continue
            asked_s = self._asked_s.get(origin, float("-inf"))
            last_s = max(heard_s, asked_s)
            if is_open(origin):
                if now_s - asked_s >= _EJECTED_S:
                    urgent.append((last_s, origin))
            elif origin in awaited:
                if now_s - last_s >= WAITED_S:
                    urgent.append((last_s, origin))
            elif now_s - last_s >= _QUIET_S:
                quiet.append((last_s, origin))
        # The longest ago first, so that with more than the rate allows nobody is left out for ever.
        chosen = [*sorted(urgent), *sorted(quiet)][: int(RATE_PER_S * TICK_S)]
        for _, origin in chosen:
            self._asking.add(origin)
            self._asked_s[origin] = now_s
        return [self._targets[origin] for _, origin in chosen]

    def done(self, origin: Origin) -> None:
        """Note that it was asked, whatever came of it."""
        self._asking.discard(origin)
