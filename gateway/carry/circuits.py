"""Which engines are asked last because they failed: a breaker for each that did, and the set of those shunned now."""

import random
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from gateway.carry.breaker import PAUSE_S, Breaker, Fault
from gateway.routing.table import Origin, Target

_PHASES = {"closed": 0, "half_open": 1, "open": 2}
_NEVER = float("inf")


class Circuits:
    """Breakers by origin. Where nobody failed, nothing is kept, and asking costs nothing."""

    def __init__(self, entropy: random.Random) -> None:
        self._random = entropy
        self.breakers: dict[Origin, Breaker] = {}
        """Of who failed lately. While there are none, nothing here need be asked or told."""
        self._versions: dict[Origin, int] = {}
        self._targets: dict[Origin, Target] = {}
        self.live: set[Origin] = set()
        """Who is asked last, as of when somebody last called anything here."""
        self._due_s = _NEVER

    def shunned(self, now_s: float) -> AbstractSet[Origin]:
        """Return who is asked last; a live view, which is right until anything is called again."""
        if now_s >= self._due_s:
            self._look(now_s)
        return self.live

    def asked(self, target: Target, now_s: float) -> bool:
        """Note that a request goes there; return whether it is the one that tries out an open breaker."""
        breaker = self.breakers.get(target.origin)
        if breaker is None or not breaker.asked(now_s):
            return False
        self._look(now_s)
        return True

    def left(self, target: Target, now_s: float) -> None:
        """Note that the request that tried it out told nothing."""
        breaker = self.breakers.get(target.origin)
        if breaker is not None:
            breaker.left()
            self._look(now_s)

    def failed(
        self, target: Target, fault: Fault, now_s: float, *, pause_s: float = PAUSE_S
    ) -> bool:
        """Note that it failed; return whether it is ejected for that."""
        origin = target.origin
        breaker = self.breakers.get(origin)
        if breaker is None or self._versions[origin] != target.version:
            breaker = self.breakers[origin] = Breaker()
            self._versions[origin] = target.version
        opened = breaker.failed(fault, now_s, draw=self._random.random(), pause_s=pause_s)
        self._look(now_s)
        return opened

    def succeeded(self, target: Target, asked_s: float, now_s: float) -> None:
        """Note that it answered a request sent at `asked_s`."""
        breaker = self.breakers.get(target.origin)
        if breaker is not None:
            breaker.succeeded(asked_s, now_s)
            if target.origin in self.live:
                self._look(now_s)

    def lives(self, target: Target, now_s: float) -> None:
        """Note that it says to be well."""
        breaker = self.breakers.get(target.origin)
        if breaker is not None:
            breaker.lives()
            self._look(now_s)

    def is_open(self, origin: Origin) -> bool:
        """Return whether it is ejected."""
        breaker = self.breakers.get(origin)
        return breaker is not None and breaker.is_open

    def know(self, targets: Iterable[Target], now_s: float) -> None:
        """Learn who is there now: what is published anew begins anew, and who is gone is forgotten."""
        self._targets = {target.origin: target for target in targets}
        for origin in tuple(self.breakers):
            target = self._targets.get(origin)
            if target is None or target.version != self._versions[origin]:
                self._forget(origin)
        self._look(now_s)

    def tidy(self, now_s: float) -> None:
        """Forget failures of long ago."""
        for origin, breaker in tuple(self.breakers.items()):
            if breaker.is_forgotten(now_s):
                self._forget(origin)
        self._look(now_s)

    def phases(self, now_s: float) -> dict[str, int]:
        """Return by replica: 0 closed, 1 half open, 2 open."""
        return {
            target.replica: _PHASES[breaker.phase(now_s)]
            if (breaker := self.breakers.get(origin)) is not None
            else 0
            for origin, target in self._targets.items()
        }

    def _forget(self, origin: Origin) -> None:
        del self.breakers[origin], self._versions[origin]

    def _look(self, now_s: float) -> None:
        # In place: whoever chooses holds this very set.
        self.live.clear()
        due_s = _NEVER
        for origin, breaker in self.breakers.items():
            if breaker.shuns(now_s):
                self.live.add(origin)
                if breaker.until_s() > now_s:
                    due_s = min(due_s, breaker.until_s())
        self._due_s = due_s
