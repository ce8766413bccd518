"""The launch of one rank of a group: its place, its environment, and the files that MLX reads. Starts nothing.

The secret of the group is in none of them: the rank reads it from its stdin.

Every agent derives the same values from the Replica and its epoch (schemas/formation.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from machinery.files import write_atomically
from schemas.formation import Formation, Rendezvous, rendezvous
from schemas.replica import Replica
from schemas.wire.engine_config import GroupConfig

CLEARED_VARIABLES: Final = ("JACCL_", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_")
"""Prefixes of variables that MLX would read and that an agent may have inherited; ranks do not inherit them."""

REFERENCE_TIMEOUT_S: Final = 600.0
"""The time for one process alone to load the whole model and answer the golden question, in seconds."""
# Models are on disk, and only imports come before ranks wait for each other.
_JOIN_TIMEOUT_S: Final = 120.0

HOST_FILE: Final = "hosts.json"
DEVICE_FILE: Final = "devices.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """The start of one rank: its configuration, and what MLX reads."""

    group: GroupConfig
    rendezvous: Rendezvous
    environment: Mapping[str, str]
    """Variables that the ShardGroup declares."""


def join_timeout_s(formation: Formation) -> float:
    """Return the time for which ranks wait for each other in seconds; it covers a reference that rank 0's Mac makes."""
    needs_reference = formation.fits_single and formation.golden is None
    return _JOIN_TIMEOUT_S + (REFERENCE_TIMEOUT_S if needs_reference else 0.0)


def rank_of_node(replica: Replica, node: str) -> int | None:
    """Return the node's rank of the replica; None if it has none."""
    nodes = [rank.node for rank in replica.spec.ranks]
    return nodes.index(node) if node in nodes else None


def wanted_epoch(replica: Replica) -> int:
    """Return the epoch in the replica's spec; 0 for a replica with one rank."""
    formation = replica.spec.formation
    return 0 if formation is None else formation.epoch


def group_launch(replica: Replica, rank: int, secret: str = "") -> RankLaunch | None:
    """Return the launch of a rank, with the secret of its epoch; None if the replica is one process.

    Raises:
        ValueError: the ranks cannot reach each other: one has no address, or there are too many links.

    """
    formation, ranks = replica.spec.formation, replica.spec.ranks
    if formation is None:
        return None
    is_pipeline = formation.parallelism == "Pipeline"
    places = rendezvous(replica.metadata.uid, formation, ranks)
    host, port = places.control
    group = GroupConfig(
        rank=rank,
        world_size=len(ranks),
        host=host,
        port=port,
        secret=secret,
        epoch=formation.epoch,
        backend=formation.backend,
        parallelism=formation.parallelism,
        layers=tuple(assignment.layers for assignment in ranks) if is_pipeline else (),
        timeout_s=join_timeout_s(formation),
    )
    return RankLaunch(group=group, rendezvous=places, environment=formation.environment)


def group_variables(launch: RankLaunch, folder: Path) -> dict[str, str]:
    """Return the environment variables of the rank; `folder` holds its files."""
    group = launch.group
    variables = {
        **launch.environment,
        "MLX_RANK": str(group.rank),
        "MLX_HOSTFILE": str(folder / HOST_FILE),
    }
    if group.backend != "ring":
        variables["MLX_IBV_DEVICES"] = str(folder / DEVICE_FILE)
        host, port = launch.rendezvous.coordinator
        variables["MLX_JACCL_COORDINATOR"] = f"{host}:{port}"
    if group.backend == "jaccl-ring":
        variables["MLX_JACCL_RING"] = "1"
    return variables


def write_group_files(launch: RankLaunch, folder: Path) -> None:
    """Write the files that MLX reads when the ranks connect.

    Raises:
        OSError: the folder cannot be written to.

    """
    write_atomically(folder / HOST_FILE, json.dumps(launch.rendezvous.hosts))
    if launch.rendezvous.devices is not None:
        matrix = [[_device_cell(names) for names in row] for row in launch.rendezvous.devices]
        write_atomically(folder / DEVICE_FILE, json.dumps(matrix))


def _device_cell(names: Sequence[str]) -> str | list[str] | None:
    """Return one cell of JACCL's matrix: null, a device, or a list of devices for several cables."""
    if not names:
        return None
    return names[0] if len(names) == 1 else list(names)
