"""What a host file says, whatever form it has. A value; reads and writes nothing.

Text of a host file to what it says, or everything that is wrong with it by line and field. Pure.

Shapes: `mlx/_distributed_utils/common.py` of MLX 0.32 (`Hostfile`), its `distributed/ring/ring.cpp` (a rank is a
list of "ip:port", or one), `distributed/jaccl` (the matrix of devices), and LocalAI's docs/content/features/mlx-distributed.md.
"""

import ipaddress
import json
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from manifests import suggestions
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import Document
from manifests.trees import Path
from manifests.yaml import parser
from manifests.yaml.nodes import YamlNode, find_node

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


_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_KNOWN_FIELDS = {"": ("backend", "envs", "hosts"), "host": ("ssh", "ips", "rdma")}
_SHAPES = (
    'Expected a host file of mlx.launch ({"hosts": [{"ssh": "studio-1", "ips": ["10.0.0.1"]}, ...]}), a ring '
    '(["10.0.0.1:5000", ...] or lists of such), or a matrix of RDMA devices ([[null, "rdma_en5"], ["rdma_en5", null]])'
)


def read_hostfile(text: str, source: str) -> HostFile:
    """Return what the file says.

    Raises:
        ManifestErrors: everything that is wrong with it, each with its line and field.

    """
    reader = _HostFileReader(Document(source=source, root=_parse(text, source)))
    found = reader.read()
    if reader.problems:
        raise ManifestErrors(reader.problems)
    return found


def _parse(text: str, source: str) -> YamlNode:
    """Return the JSON document with the places of its values."""
    text = text.removeprefix("\ufeff")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        problem = ManifestError(
            source=source,
            line=error.lineno,
            column=error.colno,
            message=f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]}",
            hint=_SHAPES,
        )
        raise ManifestErrors([problem]) from error
    except RecursionError as error:
        message = "is nested too deeply for a host file"
        raise ManifestErrors(
            [ManifestError(source=source, message=message, hint=_SHAPES)]
        ) from error
    # JSON is YAML but for tabs between its words; within a text of JSON there can be none.
    parsed = parser.parse(text.replace("\t", " "), source)
    if parsed.problems:
        raise ManifestErrors(parsed.problems)
    if not parsed.documents:
        raise ManifestErrors([ManifestError(source=source, message="says null", hint=_SHAPES)])
    return parsed.documents[0]


class _HostFileReader:
    """Reads one document; collects what is wrong with it."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.problems: list[ManifestError] = []
        self._notes: list[str] = []
        self._ports: list[str] = []

    def read(self) -> HostFile:
        content = self._document.root.content
        if isinstance(content, dict):
            return self._launch(("hosts",))
        items = content if isinstance(content, list) else []
        if items and all(isinstance(item.content, dict) for item in items):
            return self._launch(())
        form = _form_of(items)
        if form is None:
            self._wrong(
                (),
                f"is no host file: it holds {suggestions.describe_node(self._document.root)}",
                _SHAPES,
            )
            return HostFile(document=self._document, form="launch", hosts=())
        if form == "devices":
            rows = [self._row((n,), rank=n, size=len(items)) for n in range(len(items))]
            made = tuple(Host(path=(n,), rdma=row) for n, row in enumerate(rows))
            return HostFile(document=self._document, form=form, hosts=made)
        hosts = tuple(Host(path=(n,), addresses=self._listens((n,))) for n in range(len(items)))
        ports = ", ".join(dict.fromkeys(self._ports))
        note = f"ports {ports}: ranks listen from spec.port to 8,192 above, on others in each epoch"
        return HostFile(document=self._document, form=form, hosts=hosts, notes=(note,))

    def _launch(self, path: Path) -> HostFile:
        hosts = self._items(path, "a list of hosts")
        if path:
            self._note_unknown((), "")
        return HostFile(
            document=self._document,
            form="launch",
            hosts=tuple(self._host((*path, n), rank=n, size=len(hosts)) for n in range(len(hosts))),
            backend=self._text(("backend",)) if path else "",
            environment=self._environment() if path else (),
            notes=tuple(self._notes),
        )

    def _host(self, path: Path, *, rank: int, size: int) -> Host:
        if not isinstance(self._at(path), dict):
            self._expected(path, 'a host such as {"ssh": "studio-1", "ips": ["10.0.0.1"]}')
            return Host(path=path)
        self._note_unknown(path, "host")
        ssh = self._at((*path, "ssh"))
        if not isinstance(ssh, str) or not ssh:
            self._expected((*path, "ssh"), "the name that ssh knows the Mac by")
            ssh = ""
        ips = self._items((*path, "ips"), "a list of addresses", is_needed=False)
        there = self._items((*path, "rdma"), "a list of RDMA devices", is_needed=False)
        return Host(
            path=path,
            ssh=ssh,
            addresses=tuple(self._address((*path, "ips", n)) for n in range(len(ips))),
            rdma=self._row((*path, "rdma"), rank=rank, size=size) if there else (),
        )

    def _listens(self, path: Path) -> tuple[str, ...]:
        """Return the addresses of a rank of a ring; their ports are noted."""
        content = self._at(path)
        paths = [(*path, n) for n in range(len(content))] if isinstance(content, list) else [path]
        if not paths:
            self._expected(path, '"address:port" or a list of such')
        found, ports = [], []
        for one in paths:
            text = self._at(one)
            address, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
            if not (colon and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
                self._expected(one, '"address:port", such as "10.0.0.1:5000"')
                continue
            ports.append(port)
            found.append(self._checked(one, address))
        self._ports.extend(ports)
        return tuple(found)

    def _row(self, path: Path, *, rank: int, size: int) -> tuple[tuple[str, ...], ...]:
        """Return one rank's devices towards each rank."""
        cells = self._items(path, "the devices towards each rank")
        if len(cells) != size:
            self._wrong(
                path,
                f"names devices towards {len(cells)} of {size} ranks",
                "Write one entry for each rank, in rank order, and null for the rank itself",
            )
            return ()
        row = tuple(self._devices((*path, n)) for n in range(size))
        if row[rank]:
            self._wrong((*path, rank), "is a device of the rank towards itself", "Write null")
        return row

    def _devices(self, path: Path) -> tuple[str, ...]:
        content = self._at(path)
        if content is None:
            return ()
        names = [content] if isinstance(content, str) else []
        if isinstance(content, list):
            names = [item.content for item in content if isinstance(item.content, str)]
        is_whole = not isinstance(content, list) or len(names) == len(content)
        if not (names and is_whole and all(_DEVICE.fullmatch(name) for name in names)):
            self._expected(path, 'null, a device such as "rdma_en5", or a list of devices')
            return ()
        return tuple(names)

    def _address(self, path: Path) -> str:
        text = self._at(path)
        if not isinstance(text, str):
            self._expected(path, 'an address such as "10.0.0.1"')
            return ""
        return self._checked(path, text)

    def _checked(self, path: Path, text: str) -> str:
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            self._wrong(
                path,
                f"{json.dumps(text[:60])} is no IPv4 address",
                "Write the number: a name may mean another address on another Mac, and MLX's ring reads no IPv6",
            )
            return ""

    def _environment(self) -> tuple[tuple[str, str], ...]:
        found = []
        for n in range(len(self._items(("envs",), "a list of variables", is_needed=False))):
            text = self._at(("envs", n))
            if not isinstance(text, str) or not _VARIABLE.fullmatch(text):
                self._expected(("envs", n), '"NAME=value", such as "MLX_METAL_FAST_SYNCH=1"')
                continue
            name, _, value = text.partition("=")
            found.append((name, value))
        return tuple(found)

    def _note_unknown(self, path: Path, where: str) -> None:
        content = self._at(path)
        assert isinstance(content, dict)
        for key in content.keys() - set(_KNOWN_FIELDS[where]):
            self._notes.append(
                f"{self._show((*path, key))} is a field that MLX does not read, either"
            )

    def _items(self, path: Path, what: str, *, is_needed: bool = True) -> list[YamlNode]:
        content = self._at(path)
        if isinstance(content, list) and (content or not is_needed):
            return content
        if content is not None or is_needed:
            self._expected(path, what)
        return []

    def _text(self, path: Path) -> str:
        content = self._at(path)
        if content is not None and not isinstance(content, str):
            self._expected(path, "a text")
        return content if isinstance(content, str) else ""

    def _at(self, path: Path) -> object:
        node = find_node(self._document.root, path)
        return None if node is None else node.content

    def _show(self, path: Path) -> str:
        return self._document.problem(path, "").path

    def _expected(self, path: Path, what: str) -> None:
        node = find_node(self._document.root, path)
        got = "nothing" if node is None else suggestions.describe_node(node)
        self._wrong(path, f"expected {what}, got {got}")

    def _wrong(self, path: Path, message: str, hint: str = "") -> None:
        self.problems.append(self._document.problem(path, message, hint))


def _form_of(items: list[YamlNode]) -> Form | None:
    """Return what a list of texts or lists is; None if it is neither."""
    if not items:
        return None
    flat = [
        cell.content
        for item in items
        for cell in (item.content if isinstance(item.content, list) else [item])
    ]
    if all(isinstance(item.content, list) for item in items) and any(
        cell is None or isinstance(cell, list) for cell in flat
    ):
        return "devices"
    is_ring = any(isinstance(cell, str) and ":" in cell for cell in flat)
    return "ring" if is_ring else None
