"""From a group whose ranks know how to reach each other to the files of others. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fleetctl.hostfiles.grouping import tree_of_spec
from manifests.tree import Tree
from schemas.formation import Seat
from schemas.shardgroup import ShardGroup, ShardGroupSpec

Kind: TypeAlias = Literal["launch", "ring", "localai-ring", "devices"]
KINDS: tuple[Kind, ...] = ("launch", "ring", "localai-ring", "devices")
# Where mlx.launch begins (`--starting-port`).
FIRST_PORT = 32323


class UnwritableError(Exception):
    """The group does not have what this form of file says; the message says which form does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A host file, and what of the group it cannot say, in sentences."""

    text: str
    left_out: tuple[str, ...]


def written(group: ShardGroup, seats: Sequence[Seat], kind: Kind, port: int) -> Exported:
    """Return the file of that kind; ranks of a ring listen on ports from `port` up.

    Raises:
        UnwritableError: the group does not have what such a file says.

    """
    spec = group.spec
    left_out = _left_out(spec, seats, kind)
    match kind:
        case "launch":
            return Exported(text=_lines(_launch(spec, seats)), left_out=left_out)
        case "ring":
            return Exported(
                text=_lines([[*row] for row in _listens(seats, port)]), left_out=left_out
            )
        case "localai-ring":
            # LocalAI reads one address of each rank.
            flat: list[Tree] = [ports[0] for ports in _listens(seats, port)]
            return Exported(text=_lines(flat), left_out=left_out)
        case "devices":
            return Exported(text=_lines(_matrix(spec, seats)), left_out=left_out)


def _launch(spec: ShardGroupSpec, seats: Sequence[Seat]) -> dict[str, Tree]:
    hosts: list[Tree] = []
    for seat in seats:
        host: dict[str, Tree] = {"ssh": seat.node, "ips": [*seat.addresses]}
        if seat.rdma:
            host["rdma"] = _row(seat)
        hosts.append(host)
    return {
        "backend": spec.backend,
        "envs": [f"{name}={value}" for name, value in spec.environment.items()],
        "hosts": hosts,
    }


def _listens(seats: Sequence[Seat], port: int) -> list[list[str]]:
    """Return each rank's "address:port", numbered as mlx.launch does it."""
    found: list[list[str]] = []
    for seat in seats:
        if not seat.addresses:
            raise UnwritableError(
                f"{seat.node} has no address; write spec.members[].addresses, or start its agent"
            )
        six = next((address for address in seat.addresses if ":" in address), None)
        if six is not None:
            raise UnwritableError(
                f"{seat.node} has the IPv6 address {six}, which MLX's ring does not read; give it an IPv4 one"
            )
        found.append([f"{address}:{port + n}" for n, address in enumerate(seat.addresses)])
        port += len(seat.addresses)
    return found


def _matrix(spec: ShardGroupSpec, seats: Sequence[Seat]) -> list[Tree]:
    if not all(seat.rdma for seat in seats):
        raise UnwritableError(
            f"the group has backend {spec.backend} and no RDMA devices for a matrix of them; "
            "export it as launch or ring, or write spec.members[].rdma"
        )
    return [_row(seat) for seat in seats]


def _row(seat: Seat) -> list[Tree]:
    """Return a rank's devices towards each rank: null, a name, or several."""
    return [None if not d else d[0] if len(d) == 1 else [*d] for d in seat.rdma]


def _left_out(spec: ShardGroupSpec, seats: Sequence[Seat], kind: Kind) -> tuple[str, ...]:
    said = {"members", "size", "selector"}
    if kind == "launch":
        said |= {"backend", "environment"}
    elif kind == "devices":
        # A matrix is jaccl's; whether it is a ring MLX_JACCL_RING says.
        said |= {"backend"} if spec.backend == "jaccl" else set()
    else:
        said |= {"backend"} if spec.backend == "ring" else set()
    rest = [f"spec.{name}" for name in tree_of_spec(spec) if name not in said]
    spares = [member.node for member in spec.members if member.node not in {s.node for s in seats}]
    if kind == "localai-ring" and any(len(seat.addresses) > 1 for seat in seats):
        rest.append("all but the first address of each Mac")
    return (*rest, *(f"the spare {node}" for node in spares))


def _lines(tree: Tree) -> str:
    """Return JSON, one host or rank on a line."""
    if isinstance(tree, list):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in tree) + "\n]\n"
    assert isinstance(tree, dict)
    fields = [
        f"  {json.dumps(name)}: {_field(value) if name == 'hosts' else json.dumps(value)}"
        for name, value in tree.items()
    ]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _field(value: Tree) -> str:
    assert isinstance(value, list)
    return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
