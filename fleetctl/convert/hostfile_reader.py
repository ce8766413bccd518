"""Reader of host files: launch files, ring address lists and RDMA device matrices. Pure; reports every problem.

Formats: `Hostfile` in `mlx/_distributed_utils/common.py` of MLX 0.32, `distributed/ring/ring.cpp` (a rank is one
"ip:port" or a list), `distributed/jaccl` (device matrix), and LocalAI's docs/content/features/mlx-distributed.md.
"""

import ipaddress
import json
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from manifests import suggestions
from manifests.documents import Document
from manifests.errors import ManifestError, ManifestErrors
from manifests.trees import Path
from manifests.yaml import parser
from manifests.yaml.nodes import YamlNode, find_node

Form: TypeAlias = Literal["launch", "ring", "devices"]
"""launch: host file of `mlx.launch` and `mlx.distributed_config`. ring: addresses that ranks listen on (MLX_HOSTFILE,
and LocalAI's flat list). devices: matrix of RDMA devices (MLX_IBV_DEVICES, and LocalAI's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The Mac of one rank; its position in the file is the rank."""

    path: Path
    """Path of the entry in the file."""
    ssh: str = ""
    """ssh destination for `mlx.launch`; empty if the file names no Macs."""
    addresses: tuple[str, ...] = ()
    """Addresses that the rank listens on, one per connection."""
    rdma: tuple[tuple[str, ...], ...] = ()
    """RDMA devices to each rank, in rank order, empty for the rank itself; () if the file has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFile:
    """A parsed host file."""

    document: Document
    form: Form
    hosts: tuple[Host, ...]
    backend: str = ""
    """Backend in the file; empty if the file names none."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables for every rank."""
    notes: tuple[str, ...] = ()
    """Notes about settings that a ShardGroup does not have."""

    def refusal(self, path: Path, message: str, hint: str) -> ManifestErrors:
        """Return the exception for a problem at the path."""
        return ManifestErrors([self.document.problem(path, message, hint)])


_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_KNOWN_FIELDS = {"": ("backend", "envs", "hosts"), "host": ("ssh", "ips", "rdma")}
_SHAPES = (
    'Expected a host file of mlx.launch ({"hosts": [{"ssh": "studio-1", "ips": ["10.0.0.1"]}, ...]}), a ring '
    '(["10.0.0.1:5000", ...] or lists of them), or a matrix of RDMA devices ([[null, "rdma_en5"], ["rdma_en5", null]])'
)


def read_hostfile(text: str, source: str) -> HostFile:
    """Parse a host file.

    Raises:
        ManifestErrors: all problems of the file, each with its line and field.

    """
    reader = _HostFileReader(Document(source=source, root=_parse(text, source)))
    host_file = reader.read()
    if reader.problems:
        raise ManifestErrors(reader.problems)
    return host_file


def _parse(text: str, source: str) -> YamlNode:
    """Parse JSON into nodes that know their line and column."""
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
    except (RecursionError, ValueError) as error:
        is_deep = isinstance(error, RecursionError)
        message = (
            "is nested too deeply for a host file"
            if is_deep
            else "has a number of thousands of digits"
        )
        raise ManifestErrors(
            [ManifestError(source=source, message=message, hint=_SHAPES)]
        ) from error
    # JSON is a subset of YAML except for tabs as white space; JSON strings cannot contain raw tabs.
    parsed = parser.parse(text.replace("\t", " "), source)
    if parsed.problems:
        raise ManifestErrors(parsed.problems)
    if not parsed.documents:
        raise ManifestErrors(
            [ManifestError(source=source, message="the file is null", hint=_SHAPES)]
        )
    return parsed.documents[0]


class _HostFileReader:
    """Reader of one document; collects its problems."""

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
            self._report(
                (),
                f"is not a host file: it holds {suggestions.describe_node(self._document.root)}",
                _SHAPES,
            )
            return HostFile(document=self._document, form="launch", hosts=())
        if form == "devices":
            rows = [self._device_row((n,), rank=n, size=len(items)) for n in range(len(items))]
            entries = tuple(Host(path=(n,), rdma=row) for n, row in enumerate(rows))
            return HostFile(document=self._document, form=form, hosts=entries)
        hosts = tuple(
            Host(path=(n,), addresses=self._listen_addresses((n,))) for n in range(len(items))
        )
        ports = ", ".join(dict.fromkeys(self._ports))
        note = f"ports {ports}: ranks listen on spec.port to spec.port + 8192; the ports change with each epoch"
        return HostFile(document=self._document, form=form, hosts=hosts, notes=(note,))

    def _launch(self, path: Path) -> HostFile:
        hosts = self._items(path, "a list of hosts")
        if path:
            self._report_unknown_fields((), "")
        return HostFile(
            document=self._document,
            form="launch",
            hosts=tuple(self._host((*path, n), rank=n, size=len(hosts)) for n in range(len(hosts))),
            backend=self._text(("backend",)) if path else "",
            environment=self._environment() if path else (),
            notes=tuple(self._notes),
        )

    def _host(self, path: Path, *, rank: int, size: int) -> Host:
        if not isinstance(self._content(path), dict):
            self._report_expected(path, 'a host such as {"ssh": "studio-1", "ips": ["10.0.0.1"]}')
            return Host(path=path)
        self._report_unknown_fields(path, "host")
        ssh = self._content((*path, "ssh"))
        if not isinstance(ssh, str) or not ssh:
            self._report_expected((*path, "ssh"), "the ssh destination of the Mac")
            ssh = ""
        ips = self._items((*path, "ips"), "a list of addresses", is_needed=False)
        rdma_entries = self._items((*path, "rdma"), "a list of RDMA devices", is_needed=False)
        return Host(
            path=path,
            ssh=ssh,
            addresses=tuple(self._address((*path, "ips", n)) for n in range(len(ips))),
            rdma=self._device_row((*path, "rdma"), rank=rank, size=size) if rdma_entries else (),
        )

    def _listen_addresses(self, path: Path) -> tuple[str, ...]:
        """Return the addresses of one rank of a ring, and record their ports."""
        content = self._content(path)
        paths = [(*path, n) for n in range(len(content))] if isinstance(content, list) else [path]
        if not paths:
            self._report_expected(path, '"address:port" or a list of them')
        listen_addresses, ports = [], []
        for one in paths:
            text = self._content(one)
            address, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
            if not (colon and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
                self._report_expected(one, '"address:port", such as "10.0.0.1:5000"')
                continue
            ports.append(port)
            listen_addresses.append(self._check_address(one, address))
        self._ports.extend(ports)
        return tuple(listen_addresses)

    def _device_row(self, path: Path, *, rank: int, size: int) -> tuple[tuple[str, ...], ...]:
        """Return one rank's devices to each rank."""
        cells = self._items(path, "the devices to each rank")
        if len(cells) != size:
            self._report(
                path,
                f"names devices to {len(cells)} of {size} ranks",
                "Write one entry per rank, in rank order, and null for the rank itself",
            )
            return ()
        row = tuple(self._devices((*path, n)) for n in range(size))
        if row[rank]:
            self._report((*path, rank), "is a device from the rank to itself", "Write null")
        return row

    def _devices(self, path: Path) -> tuple[str, ...]:
        content = self._content(path)
        if content is None:
            return ()
        names = [content] if isinstance(content, str) else []
        if isinstance(content, list):
            names = [item.content for item in content if isinstance(item.content, str)]
        is_whole = not isinstance(content, list) or len(names) == len(content)
        if not (names and is_whole and all(_DEVICE.fullmatch(name) for name in names)):
            self._report_expected(path, 'null, a device such as "rdma_en5", or a list of devices')
            return ()
        return tuple(names)

    def _address(self, path: Path) -> str:
        text = self._content(path)
        if not isinstance(text, str):
            self._report_expected(path, 'an address such as "10.0.0.1"')
            return ""
        return self._check_address(path, text)

    def _check_address(self, path: Path, text: str) -> str:
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            self._report(
                path,
                f"{json.dumps(text[:60])} is not an IPv4 address",
                "Use the number: a name can resolve differently on each Mac, and MLX's ring does not support IPv6",
            )
            return ""

    def _environment(self) -> tuple[tuple[str, str], ...]:
        environment = []
        for n in range(len(self._items(("envs",), "a list of variables", is_needed=False))):
            text = self._content(("envs", n))
            if not isinstance(text, str) or not _VARIABLE.fullmatch(text):
                self._report_expected(("envs", n), '"NAME=value", such as "MLX_METAL_FAST_SYNCH=1"')
                continue
            name, _, value = text.partition("=")
            environment.append((name, value))
        return tuple(environment)

    def _report_unknown_fields(self, path: Path, where: str) -> None:
        content = self._content(path)
        assert isinstance(content, dict)
        for key in content.keys() - set(_KNOWN_FIELDS[where]):
            self._notes.append(f"{self._show((*path, key))} is a field that MLX ignores, too")

    def _items(self, path: Path, what: str, *, is_needed: bool = True) -> list[YamlNode]:
        content = self._content(path)
        if isinstance(content, list) and (content or not is_needed):
            return content
        if content is not None or is_needed:
            self._report_expected(path, what)
        return []

    def _text(self, path: Path) -> str:
        content = self._content(path)
        if content is not None and not isinstance(content, str):
            self._report_expected(path, "text")
        return content if isinstance(content, str) else ""

    def _content(self, path: Path) -> object:
        node = find_node(self._document.root, path)
        return None if node is None else node.content

    def _show(self, path: Path) -> str:
        return self._document.problem(path, "").path

    def _report_expected(self, path: Path, what: str) -> None:
        node = find_node(self._document.root, path)
        got = "nothing" if node is None else suggestions.describe_node(node)
        self._report(path, f"expected {what}, got {got}")

    def _report(self, path: Path, message: str, hint: str = "") -> None:
        self.problems.append(self._document.problem(path, message, hint))


def _form_of(items: list[YamlNode]) -> Form | None:
    """Return the form of a list of texts or lists; None if it is no known form."""
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
