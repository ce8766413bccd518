"""What a plan for one replica is, and the pieces that plans are made of. Decides nothing."""

from dataclasses import dataclass
from typing import Final

from nodeagent.actions import Action, Withdraw
from nodeagent.observe import LocalState

FAST_LOOK_S: Final = 0.1
SLOW_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do now, and when to look again though nothing was heard."""

    actions: tuple[Action, ...] = ()
    look_again_s: float | None = None


def withdraw_and(seen: LocalState, *more: Action) -> tuple[Action, ...]:
    """Return the actions, after taking the endpoint away if there is one."""
    return (*((Withdraw(),) if seen.is_published else ()), *more)
