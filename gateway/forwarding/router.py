"""Puts together what a choice is made from: the table, how engines stand, and what is remembered of conversations."""

import random
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gateway.forwarding.load_tracker import LoadTracker
from gateway.request import InferenceRequest
from gateway.routing.affinity import AffinityMemory
from gateway.routing.query import RoutingQuery
from gateway.routing.selection import ChosenEndpoint, RoutingChoice, choose
from gateway.routing.table import EngineEndpoint
from gateway.state.table_cache import TableCache
from machinery.clock import Clock

# Beyond so many names, gone ones among them, turns begin anew.
_MOST_TURNS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses for one gateway; `routing` decides, and remembers nothing itself."""

    keeper: TableCache
    loads: LoadTracker
    clock: Clock
    random: random.Random
    memory: AffinityMemory = field(default_factory=AffinityMemory)
    _turns: dict[str, int] = field(default_factory=dict)

    def draw(self) -> float:
        """Return what one request's choices are drawn with."""
        return self.random.random()

    def choose(
        self, ask: InferenceRequest, failed: AbstractSet[EngineEndpoint], draw: float
    ) -> RoutingChoice:
        """Return whom to ask, given who has failed this request; what follows it may go there, too.

        Remembered at once and not when an answer is there: of two requests that begin alike the second
        comes before the first is answered.
        """
        now_s = self.clock.monotonic()
        table, standing = self.keeper.table, self.loads.standing(now_s)
        wish = RoutingQuery(ask.model, draw, failed, ask.headers)
        model = table.models.get(ask.model)
        if model is None:
            return choose(table, wish, standing)
        self.memory.recall(ask, model, wish, now_s)
        wish.turn = self._turn(ask.model, is_first=not failed)
        choice = choose(table, wish, standing)
        if type(choice) is ChosenEndpoint:
            self.memory.keep(wish, model, choice.target, now_s)
        return choice

    def took(self, ask: InferenceRequest, target: EngineEndpoint) -> None:
        """Remember who answers the request where that is not whoever was chosen last: one of two rivals."""
        model = self.keeper.table.models.get(ask.model)
        if model is not None and model.routing.hedging is not None:
            now_s = self.clock.monotonic()
            wish = RoutingQuery(ask.model, 0.0)
            self.memory.recall(ask, model, wish, now_s)
            self.memory.keep(wish, model, target, now_s)

    def _turn(self, name: str, *, is_first: bool) -> int:
        """Return how many requests there were of the name, beginning anywhere: gateways are many."""
        turn = self._turns.get(name)
        if turn is None:
            if len(self._turns) >= _MOST_TURNS:
                self._turns.clear()
            turn = self.random.getrandbits(16)
        if is_first:
            self._turns[name] = turn + 1
        return turn
