"""Router: chooses an endpoint from the table, the endpoints' health and the affinity memory."""

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

# With more names than this, gone ones included, round-robin positions start anew.
_MOST_TURNS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses endpoints for one gateway; `gateway.routing` decides and has no state."""

    table_cache: TableCache
    load_tracker: LoadTracker
    clock: Clock
    random: random.Random
    memory: AffinityMemory = field(default_factory=AffinityMemory)
    _turns: dict[str, int] = field(default_factory=dict)

    def draw(self) -> float:
        """Return the random draw for all choices of one request."""
        return self.random.random()

    def choose(
        self, request: InferenceRequest, failed: AbstractSet[EngineEndpoint], draw: float
    ) -> RoutingChoice:
        """Return the endpoint to try, given the endpoints that failed. The choice is remembered for affinity.

        It is remembered now and not with the response: of two requests with equal prompts, the
        second often arrives before the first is answered.
        """
        now_s = self.clock.monotonic()
        table, health = self.table_cache.table, self.load_tracker.health(now_s)
        query = RoutingQuery(request.model, draw, failed, request.headers)
        model = table.models.get(request.model)
        if model is None:
            return choose(table, query, health)
        self.memory.recall(request, model, query, now_s)
        query.turn = self._turn(request.model, is_first=not failed)
        choice = choose(table, query, health)
        if type(choice) is ChosenEndpoint:
            self.memory.remember(query, model, choice.endpoint, now_s)
        return choice

    def remember_answer(self, request: InferenceRequest, endpoint: EngineEndpoint) -> None:
        """Remember the endpoint that answered, which may not be the one chosen last if the request was hedged."""
        model = self.table_cache.table.models.get(request.model)
        if model is not None and model.routing.hedging is not None:
            now_s = self.clock.monotonic()
            query = RoutingQuery(request.model, 0.0)
            self.memory.recall(request, model, query, now_s)
            self.memory.remember(query, model, endpoint, now_s)

    def _turn(self, name: str, *, is_first: bool) -> int:
        """Return the round-robin position of the model. It starts at random, because gateways are many."""
        turn = self._turns.get(name)
        if turn is None:
            if len(self._turns) >= _MOST_TURNS:
                self._turns.clear()
            turn = self.random.getrandbits(16)
        if is_first:
            self._turns[name] = turn + 1
        return turn
