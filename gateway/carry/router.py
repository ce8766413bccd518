"""Puts together what a choice is made from: the table, how engines stand, and what is remembered of conversations."""

import random
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gateway.asks import Ask
from gateway.carry.loads import Loads
from gateway.known.keeper import TableKeeper
from gateway.routing.choosing import Choice, choose
from gateway.routing.table import Target
from machinery.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses for one gateway; `routing` decides, and remembers nothing itself."""

    keeper: TableKeeper
    loads: Loads
    clock: Clock
    random: random.Random

    def draw(self) -> float:
        """Return what one request's choices are drawn with."""
        return self.random.random()

    def choose(self, ask: Ask, failed: AbstractSet[Target], draw: float) -> Choice:
        """Return whom to ask, given who has failed this request."""
        standing = self.loads.standing(self.clock.monotonic())
        return choose(self.keeper.table, ask.model, standing, draw=draw, failed=failed)

    def took(self, ask: Ask, target: Target) -> None:
        """Remember who answers the request: what follows it may go there, too."""
