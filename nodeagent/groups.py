"""What one rank of a group is started with: flags, variables, and the files that MLX reads. Starts nothing.

Every agent derives the same from the Replica and its epoch (schemas/rendezvous.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from machinery.files import write_atomically
from schemas.formation import Formation
from schemas.rendezvous import Rendezvous, rendezvous
from schemas.replica import Replica
from schemas.shardgroup import Backend, Parallelism

# What an agent may have inherited from whoever started it, and MLX would believe before it believes us.
INHERITED: Final = ("JACCL_", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_")

REFERENCE_S: Final = 600.0
"""How long one process may take to load the whole model and answer the golden question."""
# Models are on disk, and nothing but imports comes before ranks wait for each other.
_JOIN_S: Final = 120.0

HOSTFILE: Final = "hosts.json"
DEVICES: Final = "devices.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """The place of one process in its group, for one epoch."""

    rank: int
    world_size: int
    epoch: int
    backend: Backend
    parallelism: Parallelism
    layers: tuple[int, ...]
    """How many layers each rank has; () unless it is a Pipeline."""
    meeting: Rendezvous
    environment: Mapping[str, str]
    """What the group's owner says."""
    secret: str
    join_s: float
    """How long it waits for the other ranks, in seconds."""


def join_s(formation: Formation) -> float:
    """Return how long ranks wait for each other, in seconds; for a reference to be made on rank 0's Mac, too."""
    is_referred = formation.fits_single and formation.golden is None
    return _JOIN_S + (REFERENCE_S if is_referred else 0.0)


def rank_on(replica: Replica, node: str) -> int | None:
    """Return the rank that the node has; None if it has none."""
    nodes = [rank.node for rank in replica.spec.ranks]
    return nodes.index(node) if node in nodes else None


def epoch_of(replica: Replica) -> int:
    """Return the epoch that is wanted; 0 where there is one rank."""
    formation = replica.spec.formation
    return 0 if formation is None else formation.epoch


def group_order(replica: Replica, rank: int) -> GroupOrder | None:
    """Return the rank's place; None where the replica is one process.

    Raises:
        ValueError: the ranks cannot meet: one has no address, or there are too many links.

    """
    formation, ranks = replica.spec.formation, replica.spec.ranks
    if formation is None:
        return None
    is_pipeline = formation.parallelism == "Pipeline"
    return GroupOrder(
        rank=rank,
        world_size=len(ranks),
        epoch=formation.epoch,
        backend=formation.backend,
        parallelism=formation.parallelism,
        layers=tuple(one.layers for one in ranks) if is_pipeline else (),
        meeting=rendezvous(replica.metadata.uid, formation, ranks),
        environment=formation.environment,
        secret=formation.secret,
        join_s=join_s(formation),
    )


def flags(group: GroupOrder) -> list[str]:
    """Return the words by which an engine knows its place (nodeagent/engine/flags.py)."""
    layers = ("--layers", ",".join(map(str, group.layers))) if group.layers else ()
    return [
        *("--rank", str(group.rank)),
        *("--world-size", str(group.world_size)),
        *("--coordinator", _joined(group.meeting.control)),
        *("--epoch", str(group.epoch)),
        *("--backend", group.backend),
        *("--parallelism", group.parallelism),
        *layers,
        *("--join-timeout", f"{group.join_s:g}"),
    ]


def _joined(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


def variables(group: GroupOrder, folder: Path) -> dict[str, str]:
    """Return what the rank has in its environment; `folder` is where its files lie."""
    found = {
        **group.environment,
        "MLX_FLEET_GROUP_SECRET": group.secret,
        "MLX_RANK": str(group.rank),
        "MLX_HOSTFILE": str(folder / HOSTFILE),
    }
    if group.backend != "ring":
        found["MLX_IBV_DEVICES"] = str(folder / DEVICES)
        found["MLX_JACCL_COORDINATOR"] = _joined(group.meeting.coordinator)
    if group.backend == "jaccl-ring":
        found["MLX_JACCL_RING"] = "1"
    return found


def write_files(group: GroupOrder, folder: Path) -> None:
    """Write what MLX reads when the ranks connect.

    Raises:
        OSError: the folder cannot be written to.

    """
    write_atomically(folder / HOSTFILE, json.dumps(group.meeting.hosts))
    if group.meeting.devices is not None:
        matrix = [[_cell(names) for names in row] for row in group.meeting.devices]
        write_atomically(folder / DEVICES, json.dumps(matrix))


def _cell(names: Sequence[str]) -> str | list[str] | None:
    """Return one cell of JACCL's matrix: nothing, a device, or several for several cables."""
    if not names:
        return None
    return names[0] if len(names) == 1 else list(names)
