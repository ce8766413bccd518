"""What a host file says, whatever form it has. A value; reads and writes nothing."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from manifests.errors import ManifestErrors
from manifests.load import Document
from manifests.tree import Path

Form: TypeAlias = Literal["launch", "ring", "devices"]
"""launch: of `mlx.launch` and `mlx.distributed_config`. ring: addresses that ranks listen on (MLX_HOSTFILE, and
LocalAI's flat list). devices: the matrix of RDMA devices (MLX_IBV_DEVICES, and LocalAI's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One rank's Mac; its place in the file is the rank."""

    path: Path
    """Where it stands in the file."""
    ssh: str = ""
    """What `mlx.launch` logs in to; empty where the file names no Macs."""
    addresses: tuple[str, ...] = ()
    """Where it listens, one for each connection."""
    rdma: tuple[tuple[str, ...], ...] = ()
    """Its devices towards each rank, in rank order and empty towards itself; () where the file gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFile:
    """A host file that was read."""

    document: Document
    form: Form
    hosts: tuple[Host, ...]
    backend: str = ""
    """As the file says it; empty where it does not."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables for every rank."""
    notes: tuple[str, ...] = ()
    """What the file says and a ShardGroup has no word for."""

    def refusal(self, path: Path, message: str, hint: str) -> ManifestErrors:
        """Return what to raise because of what the file says there."""
        return ManifestErrors([self.document.problem(path, message, hint)])
