"""What one rank of a group is started with: flags, variables, and the files that MLX reads. Starts nothing.

Every agent derives the same from the Replica and its epoch (schemas/formation.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from machinery.files import write_atomically
from schemas.formation import Formation, Rendezvous, rendezvous
from schemas.replica import Replica
from schemas.shardgroup import Backend, Parallelism

# What an agent may have inherited from whoever started it, and MLX would believe before it believes us.
CLEARED_VARIABLES: Final = ("JACCL_", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_")

REFERENCE_TIMEOUT_S: Final = 600.0
"""How long one process may take to load the whole model and answer the golden question."""
# Models are on disk, and nothing but imports comes before ranks wait for each other.
_JOIN_TIMEOUT_S: Final = 120.0

HOST_FILE: Final = "hosts.json"
DEVICE_FILE: Final = "devices.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
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


def join_timeout_s(formation: Formation) -> float:
    """Return how long ranks wait for each other, in seconds; for a reference to be made on rank 0's Mac, too."""
    is_referred = formation.fits_single and formation.golden is None
    return _JOIN_TIMEOUT_S + (REFERENCE_TIMEOUT_S if is_referred else 0.0)


def rank_of_node(replica: Replica, node: str) -> int | None:
    """Return the rank that the node has; None if it has none."""
    nodes = [rank.node for rank in replica.spec.ranks]
    return nodes.index(node) if node in nodes else None


def wanted_epoch(replica: Replica) -> int:
    """Return the epoch that is wanted; 0 where there is one rank."""
    formation = replica.spec.formation
    return 0 if formation is None else formation.epoch


def group_order(replica: Replica, rank: int) -> RankLaunch | None:
    """Return the rank's place; None where the replica is one process.

    Raises:
        ValueError: the ranks cannot meet: one has no address, or there are too many links.

    """
    formation, ranks = replica.spec.formation, replica.spec.ranks
    if formation is None:
        return None
    is_pipeline = formation.parallelism == "Pipeline"
    return RankLaunch(
        rank=rank,
        world_size=len(ranks),
        epoch=formation.epoch,
        backend=formation.backend,
        parallelism=formation.parallelism,
        layers=tuple(one.layers for one in ranks) if is_pipeline else (),
        meeting=rendezvous(replica.metadata.uid, formation, ranks),
        environment=formation.environment,
        secret=formation.secret,
        join_s=join_timeout_s(formation),
    )


def group_flags(group: RankLaunch) -> list[str]:
    """Return the words by which an engine knows its place (engine/flags.py)."""
    layers = ("--layers", ",".join(map(str, group.layers))) if group.layers else ()
    return [
        *("--rank", str(group.rank)),
        *("--world-size", str(group.world_size)),
        *("--coordinator", _host_port(group.meeting.control)),
        *("--epoch", str(group.epoch)),
        *("--backend", group.backend),
        *("--parallelism", group.parallelism),
        *layers,
        *("--join-timeout", f"{group.join_s:g}"),
    ]


def _host_port(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


def group_variables(group: RankLaunch, folder: Path) -> dict[str, str]:
    """Return what the rank has in its environment; `folder` is where its files lie."""
    found = {
        **group.environment,
        "MLX_FLEET_GROUP_SECRET": group.secret,
        "MLX_RANK": str(group.rank),
        "MLX_HOSTFILE": str(folder / HOST_FILE),
    }
    if group.backend != "ring":
        found["MLX_IBV_DEVICES"] = str(folder / DEVICE_FILE)
        found["MLX_JACCL_COORDINATOR"] = _host_port(group.meeting.coordinator)
    if group.backend == "jaccl-ring":
        found["MLX_JACCL_RING"] = "1"
    return found


def write_group_files(group: RankLaunch, folder: Path) -> None:
    """Write what MLX reads when the ranks connect.

    Raises:
        OSError: the folder cannot be written to.

    """
    write_atomically(folder / HOST_FILE, json.dumps(group.meeting.hosts))
    if group.meeting.devices is not None:
        matrix = [[_device_cell(names) for names in row] for row in group.meeting.devices]
        write_atomically(folder / DEVICE_FILE, json.dumps(matrix))


def _device_cell(names: Sequence[str]) -> str | list[str] | None:
    """Return one cell of JACCL's matrix: nothing, a device, or several for several cables."""
    if not names:
        return None
    return names[0] if len(names) == 1 else list(names)
