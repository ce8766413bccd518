"""Conversion between host files and ShardGroups, in both directions. Pure."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pydantic import ValidationError

from fleetctl.convert.hostfile_reader import Host, HostFile
from fleetctl.convert.node_names import NodeNames
from manifests.trees import Tree, object_tree
from manifests.yaml import parser
from manifests.yaml.comments import comment_lines
from schemas.formation import Seat
from schemas.meta import API_VERSION, ObjectMeta
from schemas.shardgroup import Backend, GroupMember, ShardGroup, ShardGroupSpec

_BACKENDS: dict[str, Backend] = {"ring": "ring", "jaccl": "jaccl", "jaccl-ring": "jaccl-ring"}
_ALLOWED_VARIABLE = re.compile(r"(MLX|JACCL)_[A-Z0-9_]{1,60}")
# The fleet derives these from the members; schemas/shardgroup.py refuses them in manifests.
_DERIVED = ("RANK", "HOSTFILE", "IBV_DEVICES", "JACCL_COORDINATOR", "COORDINATOR", "WORLD_SIZE")
_RING_VARIABLES = ("MLX_JACCL_RING", "JACCL_RING")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Settings of an import that the command line adds to the file."""

    name: str
    """Name of the ShardGroup."""
    nodes: NodeNames = field(default_factory=NodeNames)
    """Finds the nodes of the ranks."""
    backend: Backend | None = None
    """Overrides the file's backend."""
    fast_synch: str | None = None
    """MLX_METAL_FAST_SYNCH of every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupImport:
    """A ShardGroup, and notes about settings without a counterpart."""

    group: ShardGroup
    notes: tuple[str, ...]

    def manifest(self) -> str:
        """Return the YAML for `fleetctl apply`, with the notes as comments."""
        tree: dict[str, Tree] = object_tree(self.group)
        spec = spec_tree(self.group.spec)
        # Write the backend even if it is the default: readers of a converted file look for it.
        tree["spec"] = {**spec, "backend": self.group.spec.backend}
        return comment_lines(self.notes) + parser.dump(tree)


def spec_tree(spec: ShardGroupSpec) -> dict[str, Tree]:
    """Return the spec without fields that have their default value."""
    tree: dict[str, Tree] = spec.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_defaults=True
    )
    return tree


def build_group(file: HostFile, options: GroupOptions) -> GroupImport:
    """Convert a host file to a ShardGroup.

    Raises:
        ManifestErrors: the file does not describe a valid group; with line and field.

    """
    nodes = _nodes(file, options.nodes)
    environment, notes = _environment(file)
    if options.fast_synch is not None:
        environment["MLX_METAL_FAST_SYNCH"] = options.fast_synch
    backend = options.backend or _backend(file)
    members = tuple(
        GroupMember(node=node, addresses=host.addresses, rdma=_links(host, rank, nodes))
        for rank, (node, host) in enumerate(zip(nodes, file.hosts, strict=True))
    )
    if backend != "ring":
        _check_links(file, nodes, backend)
    try:
        spec = ShardGroupSpec(members=members, backend=backend, environment=environment)
        group = ShardGroup(metadata=ObjectMeta(name=options.name), spec=spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise file.refusal((), f"{field or 'the group'}: {reason}", "") from error
    return GroupImport(group=group, notes=(*file.notes, *notes, *_more_notes(file, nodes, backend)))


def one_mac_pool(file: HostFile, options: GroupOptions) -> str:
    """Convert a host file of one Mac, which needs no ShardGroup, to the NodePool of that Mac.

    Raises:
        ManifestErrors: the file does not name the node, and the options do not either.

    """
    (host,) = file.hosts
    if len(options.nodes.given) > 1:
        given = len(options.nodes.given)
        raise file.refusal((), f"has 1 rank, but --nodes names {given} Macs", "")
    node = options.nodes.find(0, host.ssh, *host.addresses)
    if not node:
        raise file.refusal(host.path, "does not name the node of rank 0", options.nodes.advice)
    _, notes = _environment(file)
    about = "one Mac needs no ShardGroup; deployments name this pool in spec.placement.pools"
    tree: dict[str, Tree] = {
        "apiVersion": API_VERSION,
        "kind": "NodePool",
        "metadata": {"name": options.name},
        "spec": {"nodes": [node]},
    }
    return comment_lines((about, *file.notes, *notes)) + parser.dump(tree)


def _nodes(file: HostFile, names: NodeNames) -> tuple[str, ...]:
    """Return each rank's node."""
    size, given = len(file.hosts), names.given
    if size < 2:
        raise file.refusal(
            (),
            f"has {size} rank, but a group needs at least two Macs",
            "A deployment on one Mac needs no group (spec.sharding: Never)"
            if size
            else "Add the Macs",
        )
    if given and len(given) != size:
        hint = "Name one node per rank, in rank order"
        raise file.refusal((), f"has {size} ranks, but --nodes names {len(given)} Macs", hint)
    nodes = tuple(
        names.find(rank, host.ssh, *host.addresses) for rank, host in enumerate(file.hosts)
    )
    for rank, name in enumerate(nodes):
        if not name:
            raise file.refusal(
                file.hosts[rank].path, f"does not name the node of rank {rank}", names.advice
            )
        if name in nodes[:rank]:
            raise file.refusal(
                file.hosts[rank].path,
                f"ranks {nodes.index(name)} and {rank} are both on {name}; a Mac can have only one rank of a group",
                "Give --nodes with a different Mac for each rank",
            )
    return nodes


def _links(host: Host, rank: int, nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {
        nodes[peer]: devices for peer, devices in enumerate(host.rdma) if devices and peer != rank
    }


def _backend(file: HostFile) -> Backend:
    """Return the file's backend, interpreted as mlx.launch and MLX do."""
    if file.backend:
        backend = _BACKENDS.get(file.backend)
        if backend is None:
            raise file.refusal(
                ("backend",),
                f"{file.backend[:40]} is not supported; the fleet's backends are {', '.join(_BACKENDS)}",
                "Choose one with --backend",
            )
        is_ring = backend == "jaccl" and any(
            name in _RING_VARIABLES for name, _ in file.environment
        )
        return "jaccl-ring" if is_ring else backend
    # mlx.launch needs --backend for it; a file lists RDMA devices to be started with that.
    if file.form != "devices" and not any(host.rdma for host in file.hosts):
        return "ring"
    if not _gaps(file.hosts, "jaccl"):
        return "jaccl"
    is_ring = file.form == "devices" or not _gaps(file.hosts, "jaccl-ring")
    return "jaccl-ring" if is_ring else "ring"


def _gaps(hosts: Sequence[Host], backend: Backend) -> list[tuple[int, int]]:
    """Return the pairs of ranks that need an RDMA device but have none."""
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
        return  # the agents report the devices
    gaps = _gaps(file.hosts, backend)
    if not gaps:
        return
    rank, peer = gaps[0]
    more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
    needs = "any two Macs" if backend == "jaccl" else "neighbours in the ring"
    raise file.refusal(
        file.hosts[rank].path,
        f"has no RDMA device from rank {rank} ({nodes[rank]}) to rank {peer} ({nodes[peer]}){more}; "
        f"{backend} needs one between {needs}",
        "Complete the file, or choose another --backend",
    )


def _environment(file: HostFile) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a group may set, and notes about the others."""
    kept, notes = {}, []
    for name, value in file.environment:
        if name in _RING_VARIABLES or name.partition("_")[2] in _DERIVED:
            notes.append(f"{name}: the fleet derives it from the members and the backend")
        elif _ALLOWED_VARIABLE.fullmatch(name):
            kept[name] = value
        else:
            notes.append(f"{name}={value[:100]}: a group may only set MLX_ and JACCL_ variables")
    return kept, notes


def _more_notes(file: HostFile, nodes: Sequence[str], backend: Backend) -> list[str]:
    notes = [
        f"ssh {host.ssh}: the fleet starts nothing over ssh; {node}'s agent starts its rank"
        for host, node in zip(file.hosts, nodes, strict=True)
        if host.ssh and host.ssh != node
    ]
    without_addresses = [
        node for host, node in zip(file.hosts, nodes, strict=True) if not host.addresses
    ]
    if without_addresses:
        notes.append(
            f"no addresses of {', '.join(without_addresses)}: taken from the agents' reports"
        )
    if backend != "ring" and not any(host.rdma for host in file.hosts):
        notes.append("no RDMA devices: taken from the agents' reports")
    if file.form == "ring":
        notes.append(
            "LocalAI runs its ring as parallelism: Pipeline, which few models have; Auto takes what the model has"
        )
        notes.append(
            "ranks neither encrypt nor authenticate: on a network that other machines share, the group needs "
            "allowUnencryptedRing: true"
        )
    return notes


HostFileKind: TypeAlias = Literal["launch", "ring", "localai-ring", "devices"]
HOSTFILE_KINDS: tuple[HostFileKind, ...] = ("launch", "ring", "localai-ring", "devices")
# The default of mlx.launch (`--starting-port`).
FIRST_PORT = 32323


class HostFileExportError(Exception):
    """The group lacks data that this form of host file needs; the message names a form that works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFileExport:
    """A host file, and the settings of the group that it cannot express."""

    text: str
    left_out: tuple[str, ...]


def render_hostfile(
    group: ShardGroup, seats: Sequence[Seat], kind: HostFileKind, port: int
) -> HostFileExport:
    """Render the host file; ranks of a ring listen on ports from `port` upwards.

    Raises:
        HostFileExportError: the group lacks data that this form needs.

    """
    spec = group.spec
    written = {"members", "size", "selector"}
    if kind == "launch":
        written |= {"backend", "environment"}
    elif kind == "devices":
        # A device matrix implies jaccl; MLX_JACCL_RING would turn it into jaccl-ring.
        written |= {"backend"} if spec.backend == "jaccl" else set()
    else:
        written |= {"backend"} if spec.backend == "ring" else set()
    rest = [f"spec.{name}" for name in spec_tree(spec) if name not in written]
    spares = [member.node for member in spec.members if member.node not in {s.node for s in seats}]
    if kind == "localai-ring" and any(len(seat.addresses) > 1 for seat in seats):
        rest.append("all but the first address of each Mac")
    left_out = (*rest, *(f"the spare {node}" for node in spares))
    match kind:
        case "launch":
            return HostFileExport(text=_lines(_launch(spec, seats)), left_out=left_out)
        case "ring":
            return HostFileExport(
                text=_lines([[*row] for row in _listen_addresses(seats, port)]), left_out=left_out
            )
        case "localai-ring":
            # LocalAI reads one address per rank.
            flat: list[Tree] = [ports[0] for ports in _listen_addresses(seats, port)]
            return HostFileExport(text=_lines(flat), left_out=left_out)
        case "devices":
            return HostFileExport(text=_lines(_matrix(spec, seats)), left_out=left_out)


def _launch(spec: ShardGroupSpec, seats: Sequence[Seat]) -> dict[str, Tree]:
    hosts: list[Tree] = []
    for seat in seats:
        host: dict[str, Tree] = {"ssh": seat.node, "ips": [*seat.addresses]}
        if seat.rdma:
            host["rdma"] = _device_row(seat)
        hosts.append(host)
    return {
        "backend": spec.backend,
        "envs": [f"{name}={value}" for name, value in spec.environment.items()],
        "hosts": hosts,
    }


def _listen_addresses(seats: Sequence[Seat], port: int) -> list[list[str]]:
    """Return each rank's "address:port" entries, numbered as mlx.launch numbers them."""
    entries: list[list[str]] = []
    for seat in seats:
        if not seat.addresses:
            raise HostFileExportError(
                f"{seat.node} has no address; set spec.members[].addresses, or start its agent"
            )
        ipv6 = next((address for address in seat.addresses if ":" in address), None)
        if ipv6 is not None:
            raise HostFileExportError(
                f"{seat.node} has the IPv6 address {ipv6}, which MLX's ring does not support; give it an IPv4 address"
            )
        entries.append([f"{address}:{port + n}" for n, address in enumerate(seat.addresses)])
        port += len(seat.addresses)
    return entries


def _matrix(spec: ShardGroupSpec, seats: Sequence[Seat]) -> list[Tree]:
    if not all(seat.rdma for seat in seats):
        raise HostFileExportError(
            f"the group's backend is {spec.backend}, and it has no RDMA devices for a device matrix; "
            "export it as launch or ring, or set spec.members[].rdma"
        )
    return [_device_row(seat) for seat in seats]


def _device_row(seat: Seat) -> list[Tree]:
    """Return a rank's devices to each rank: null, a name, or a list of names."""
    return [None if not d else d[0] if len(d) == 1 else [*d] for d in seat.rdma]


def _lines(tree: Tree) -> str:
    """Return JSON with one host or rank per line."""
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
