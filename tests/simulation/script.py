"""The script of a simulated fleet: what happens when, as a readable list made from a seed. Pure."""

import random
from dataclasses import dataclass
from enum import StrEnum

from typing_extensions import override

NAMES = ("qwen", "llama", "qwen-1")
NODES = {"a": 7.0, "b": 9.0, "c": 12.0, "d": 3.0}
"""Memory for models on each Mac, in GiB; one replica takes about three."""


class What(StrEnum):
    """The kinds of lines in a script."""

    SCALE = "scale"
    CONTEXT = "change contextLength"
    LIMITS = "change maxSurge and maxUnavailable"
    STRATEGY = "change the strategy"
    PRIORITY = "change the priority"
    MIN_AVAILABLE = "change minAvailable"
    PAUSE = "pause"
    RESUME = "resume"
    DELETE = "delete"
    DELETE_REPLICA = "delete a replica"
    AGENT_DIES = "agent dies"
    POWER_LOSS = "power loss"
    POWER_ON = "power on"
    LEASE_LOST = "lease lost"
    ENGINE_CRASHES = "engine crashes"
    ENGINE_HANGS = "engine hangs"
    CANNOT_START = "engines cannot start"
    CAN_START = "engines can start again"
    PROBE_FAILS = "first tokens fail"
    PROBE_WORKS = "first tokens work again"
    LOADS_SLOWLY = "models load slowly"
    MODEL_GONE = "model is deleted from the disk"
    MODEL_BACK = "model is back"
    DISK_FULL = "disk is full"
    DISK_FREE = "disk is free again"
    AUTOSCALE = "autoscale"
    AUTOSCALE_NO_MORE = "autoscale no more"
    LEADER_DIES = "leader dies"
    LEADER_FREEZES = "leader freezes"
    LEADER_RESTARTS = "leader restarts"
    COMPACTION = "compaction"
    WATCHES_BREAK = "watches break"
    CORDON = "cordon"
    DRAIN = "drain"
    TAINT = "taint"
    DRIVE_OUT = "taint NoExecute"
    UNCORDON = "uncordon and untaint"
    RESERVE = "pool reserves memory"
    UNRESERVE = "pool reserves nothing"
    BAD_WEATHER = "lines turn bad"
    GOOD_WEATHER = "lines turn good"


# Where one thing should come more often than another; the rest have 1.
_WEIGHTS = {
    What.SCALE: 5,
    What.CONTEXT: 4,
    What.POWER_LOSS: 3,
    What.POWER_ON: 3,
    What.LEADER_DIES: 3,
    What.BAD_WEATHER: 2,
}


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of the script; each kind uses only the fields that it needs."""

    at_s: float
    what: What
    name: str
    """A deployment."""
    node: str
    number: int
    """From 0 to 4."""

    @override
    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.what}: {self.name} {self.node} {self.number}"


def write(seed: int, length: int) -> tuple[Happening, ...]:
    """Return the script of a seed."""
    dice = random.Random(seed)
    kinds = list(What)
    weights = [_WEIGHTS.get(kind, 1) for kind in kinds]
    # Most of what can go wrong needs something that runs.
    first = [
        Happening(at_s=0.0, what=What.SCALE, name=name, node="a", number=dice.randrange(1, 5))
        for name in NAMES[:2]
    ]
    now, lines = dice.choice((0.0, 4.0)), first
    for _ in range(length - len(first)):
        now += dice.choice((0.0, 0.0, 0.0, 0.05, 0.3, 1.0, 3.0))
        lines.append(
            Happening(
                at_s=now,
                what=dice.choices(kinds, weights)[0],
                name=dice.choice(NAMES),
                node=dice.choice(sorted(NODES)),
                number=dice.randrange(5),
            )
        )
    return tuple(lines)
