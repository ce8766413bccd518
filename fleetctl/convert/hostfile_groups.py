"""From a host file to a ShardGroup, and what of it a ShardGroup has no word for. Pure.

From a group whose ranks know how to reach each other to the files of others. Pure.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import ValidationError

from fleetctl.convert.hostfile_reader import Host, HostFile
from manifests.trees import Tree, object_tree
from manifests.yaml import parser
from nodeagent.node.identity import dns_label
from schemas.formation import Seat
from schemas.meta import ObjectMeta
from schemas.shardgroup import Backend, GroupMember, ShardGroup, ShardGroupSpec

_BACKENDS: dict[str, Backend] = {"ring": "ring", "jaccl": "jaccl", "jaccl-ring": "jaccl-ring"}
_OURS = re.compile(r"(MLX|JACCL)_[A-Z0-9_]{1,60}")
# What the fleet derives from the members: schemas/shardgroup.py refuses it from people.
_DERIVED = ("RANK", "HOSTFILE", "IBV_DEVICES", "JACCL_COORDINATOR", "COORDINATOR", "WORLD_SIZE")
_RINGS = ("MLX_JACCL_RING", "JACCL_RING")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """What the command line says beside the file."""

    name: str
    """The group's."""
    nodes: tuple[str, ...] = ()
    """The Macs in rank order; () takes them from the file."""
    backend: Backend | None = None
    """Stronger than what the file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupImport:
    """A group, and what had no counterpart, in sentences."""

    group: ShardGroup
    notes: tuple[str, ...]

    def manifest(self) -> str:
        """Return YAML for `fleetctl apply`, the notes as comments."""
        tree: dict[str, Tree] = object_tree(self.group)
        spec = tree_of_spec(self.group.spec)
        # A file's backend is said even where it is the default: it is what people look for.
        tree["spec"] = {**spec, "backend": self.group.spec.backend}
        comments = "".join(f"# {_one_line(note)}\n" for note in self.notes)
        return comments + parser.dump(tree)


def tree_of_spec(spec: ShardGroupSpec) -> dict[str, Tree]:
    """Return the spec without what is left at its default."""
    tree: dict[str, Tree] = spec.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_defaults=True
    )
    return tree


def build_group(file: HostFile, wanted: GroupOptions) -> GroupImport:
    """Return the group that the file describes.

    Raises:
        ManifestErrors: it describes none; with the line and the field.

    """
    nodes = _nodes(file, wanted.nodes)
    environment, notes = _environment(file)
    backend = wanted.backend or _backend(file)
    members = tuple(
        GroupMember(node=node, addresses=host.addresses, rdma=_links(host, rank, nodes))
        for rank, (node, host) in enumerate(zip(nodes, file.hosts, strict=True))
    )
    if backend != "ring":
        _check_links(file, nodes, backend)
    try:
        spec = ShardGroupSpec(members=members, backend=backend, environment=environment)
        group = ShardGroup(metadata=ObjectMeta(name=wanted.name), spec=spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise file.refusal((), f"{where or 'the group'}: {said}", "") from error
    return GroupImport(group=group, notes=(*file.notes, *notes, *_more_notes(file, nodes, backend)))


def _nodes(file: HostFile, given: Sequence[str]) -> tuple[str, ...]:
    """Return each rank's node: as given, else by the names that ssh knows the Macs by."""
    size = len(file.hosts)
    if size < 2:
        raise file.refusal(
            (),
            f"has {size} rank, and a group needs two Macs at least",
            "On one Mac a deployment needs no group (spec.sharding: Never)",
        )
    if given and len(given) != size:
        hint = "Name one for each rank, in rank order"
        raise file.refusal((), f"has {size} ranks, and --nodes names {len(given)} Macs", hint)
    found = tuple(given) or tuple(_ssh_node_name(host) for host in file.hosts)
    for rank, name in enumerate(found):
        if not name:
            raise file.refusal(
                file.hosts[rank].path,
                f"does not say which node rank {rank} is",
                "Write --nodes NODE,NODE,... in rank order (`fleetctl get nodes` shows them)",
            )
        if name in found[:rank]:
            raise file.refusal(
                file.hosts[rank].path,
                f"ranks {found.index(name)} and {rank} are both on {name}, and a Mac has one rank of a group",
                "Write --nodes with another Mac for each rank",
            )
    return found


def _ssh_node_name(host: Host) -> str:
    """Return the name that an agent on the Mac gives its node; empty for an address."""
    name = host.ssh.rpartition("@")[2]
    is_address = bool(re.fullmatch(r"[0-9.]*|.*:.*", name))
    return "" if is_address else dns_label(name, fallback="")


def _links(host: Host, rank: int, nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    there = enumerate(host.rdma)
    return {nodes[peer]: devices for peer, devices in there if devices and peer != rank}


def _backend(file: HostFile) -> Backend:
    """Return what ranks of the file talk over, as mlx.launch and MLX take it."""
    if file.backend:
        found = _BACKENDS.get(file.backend)
        if found is None:
            raise file.refusal(
                ("backend",),
                f"{file.backend[:40]} is none of the fleet's, which are {', '.join(_BACKENDS)}",
                "Say another one with --backend",
            )
        is_ring = found == "jaccl" and any(name in _RINGS for name, _ in file.environment)
        return "jaccl-ring" if is_ring else found
    if file.form != "devices":
        return "ring"
    return "jaccl" if not _gaps(file.hosts, "jaccl") else "jaccl-ring"


def _gaps(hosts: Sequence[Host], backend: Backend) -> list[tuple[int, int]]:
    """Return the pairs of ranks that need a device and have none."""
    size = len(hosts)
    return [
        (rank, peer)
        for rank, host in enumerate(hosts)
        for peer in range(size)
        if peer != rank
        and (backend == "jaccl" or (peer - rank) % size in (1, size - 1))
        and not (host.rdma and host.rdma[peer])
    ]


def _check_links(file: HostFile, nodes: Sequence[str], backend: Backend) -> None:
    if not any(host.rdma for host in file.hosts):
        return  # agents report them
    gaps = _gaps(file.hosts, backend)
    if not gaps:
        return
    rank, peer = gaps[0]
    more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
    needs = "any two Macs" if backend == "jaccl" else "neighbours in a circle"
    raise file.refusal(
        file.hosts[rank].path,
        f"has no RDMA device of rank {rank} ({nodes[rank]}) towards rank {peer} ({nodes[peer]}){more}, and "
        f"{backend} needs one between {needs}",
        "Complete the file, or say another --backend",
    )


def _environment(file: HostFile) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a group may have, and sentences about the others."""
    kept, notes = {}, []
    for name, value in file.environment:
        if name in _RINGS or name.partition("_")[2] in _DERIVED:
            notes.append(f"{name}: the fleet derives it from the members and the backend itself")
        elif _OURS.fullmatch(name):
            kept[name] = value
        else:
            notes.append(f"{name}={value[:100]}: a group sets variables of MLX_ and JACCL_ alone")
    return kept, notes


def _more_notes(file: HostFile, nodes: Sequence[str], backend: Backend) -> list[str]:
    notes = [
        f"ssh {host.ssh}: nothing is started over ssh; {node}'s own agent starts its rank"
        for host, node in zip(file.hosts, nodes, strict=True)
        if host.ssh and host.ssh != node
    ]
    bare = [node for host, node in zip(file.hosts, nodes, strict=True) if not host.addresses]
    if bare:
        notes.append(f"no addresses of {', '.join(bare)}: what the agents report is taken")
    if backend != "ring" and not any(host.rdma for host in file.hosts):
        notes.append("no RDMA devices: what the agents report is taken")
    if file.form == "ring":
        notes.append(
            "LocalAI runs its ring as parallelism: Pipeline; Auto takes Tensor where it works"
        )
    return notes


def _one_line(note: str) -> str:
    """Return the note as it may stand in a comment, whatever the file had in it."""
    return "".join(sign if sign.isprintable() else "?" for sign in note)


HostFileKind: TypeAlias = Literal["launch", "ring", "localai-ring", "devices"]
HOSTFILE_KINDS: tuple[HostFileKind, ...] = ("launch", "ring", "localai-ring", "devices")
# Where mlx.launch begins (`--starting-port`).
FIRST_PORT = 32323


class HostFileExportError(Exception):
    """The group does not have what this form of file says; the message says which form does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFileExport:
    """A host file, and what of the group it cannot say, in sentences."""

    text: str
    left_out: tuple[str, ...]


def render_hostfile(
    group: ShardGroup, seats: Sequence[Seat], kind: HostFileKind, port: int
) -> HostFileExport:
    """Return the file of that kind; ranks of a ring listen on ports from `port` up.

    Raises:
        UnwritableError: the group does not have what such a file says.

    """
    spec = group.spec
    left_out = _left_out(spec, seats, kind)
    match kind:
        case "launch":
            return HostFileExport(text=_lines(_launch(spec, seats)), left_out=left_out)
        case "ring":
            return HostFileExport(
                text=_lines([[*row] for row in _listens(seats, port)]), left_out=left_out
            )
        case "localai-ring":
            # LocalAI reads one address of each rank.
            flat: list[Tree] = [ports[0] for ports in _listens(seats, port)]
            return HostFileExport(text=_lines(flat), left_out=left_out)
        case "devices":
            return HostFileExport(text=_lines(_matrix(spec, seats)), left_out=left_out)


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
            raise HostFileExportError(
                f"{seat.node} has no address; write spec.members[].addresses, or start its agent"
            )
        six = next((address for address in seat.addresses if ":" in address), None)
        if six is not None:
            raise HostFileExportError(
                f"{seat.node} has the IPv6 address {six}, which MLX's ring does not read; give it an IPv4 one"
            )
        found.append([f"{address}:{port + n}" for n, address in enumerate(seat.addresses)])
        port += len(seat.addresses)
    return found


def _matrix(spec: ShardGroupSpec, seats: Sequence[Seat]) -> list[Tree]:
    if not all(seat.rdma for seat in seats):
        raise HostFileExportError(
            f"the group has backend {spec.backend} and no RDMA devices for a matrix of them; "
            "export it as launch or ring, or write spec.members[].rdma"
        )
    return [_row(seat) for seat in seats]


def _row(seat: Seat) -> list[Tree]:
    """Return a rank's devices towards each rank: null, a name, or several."""
    return [None if not d else d[0] if len(d) == 1 else [*d] for d in seat.rdma]


def _left_out(spec: ShardGroupSpec, seats: Sequence[Seat], kind: HostFileKind) -> tuple[str, ...]:
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
