"""Support bundles: the compressed archive, and the collection of its contents from the store and all processes."""

import asyncio
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.terminal import ProgressLine
from fleetctl.doctor import observe
from identity.dialer import Dialer
from identity.log_access import log_path
from insight import process_client, version_skew
from insight.doctor import checks
from insight.doctor.findings import findings_tree
from insight.errors import ProcessError, ProcessRefusedError
from insight.logs import LEASED_HOLDERS
from insight.process_client import ProcessAddress
from insight.tickets import issue_ticket
from insight.version_skew import ComponentVersion
from machinery import redaction
from machinery.clock import Clock
from machinery.version import version as fleet_version
from manifests.trees import object_tree
from schemas import kinds, quantity
from schemas.replica import Replica
from store import keys, objects
from store.codec import UndecodableError
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.port import Transport

_NOT_FOUND = 404
# Size of the end of each log that is kept; the most recent lines matter most.
LOG_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleEntry:
    """One file of the bundle."""

    name: str
    size: int
    note: str = ""


class BundleArchive:
    """Archive that redacts everything it stores; `finish` writes the table of contents."""

    def __init__(self, file: BinaryIO, folder: str, now: datetime, limit_bytes: int) -> None:
        """Write below `folder` in the archive; `limit_bytes` limits the size before compression."""
        self._tar = tarfile.open(fileobj=file, mode="w:gz")  # noqa: SIM115 - closed by finish
        self._folder = folder
        self._now = now
        self._remaining_bytes = limit_bytes
        self.entries: list[BundleEntry] = []
        self.missing: list[str] = []
        """Items that could not be collected, with reasons."""

    def add_tree(self, name: str, content: Any) -> None:
        """Add a JSON document, redacted."""
        self._add(
            name, orjson.dumps(redaction.redact_tree(content), option=orjson.OPT_INDENT_2) + b"\n"
        )

    def add_text(self, name: str, content: str) -> None:
        """Add text, redacted."""
        self._add(name, redaction.redact_text(content).encode())

    def add_log(self, name: str, raw: bytes) -> None:
        """Add the end of a log, redacted."""
        cut = len(raw) > LOG_BYTES
        if cut:
            # Start at a whole line: half a line could contain half a secret, which no pattern matches.
            raw = raw[-LOG_BYTES:].partition(b"\n")[2]
        clean = redaction.redact_log(raw.decode("utf-8", "replace")).encode()
        self._add(name, clean, note=f"the last {quantity.show(LOG_BYTES)}" if cut else "")

    def add_missing(self, what: str, why: str) -> None:
        """Record an item that could not be collected."""
        self.missing.append(redaction.redact_text(f"{what}: {why}"))

    def _add(self, name: str, raw: bytes, note: str = "") -> None:
        if len(raw) > self._remaining_bytes:
            self.missing.append(f"{name}: left out, because the bundle would exceed --max-size")
            return
        self._remaining_bytes -= len(raw)
        self._write(name, raw)
        self.entries.append(BundleEntry(name=name, size=len(raw), note=note))

    def _write(self, name: str, raw: bytes) -> None:
        info = tarfile.TarInfo(f"{self._folder}/{name}")
        info.size, info.mode = len(raw), 0o600
        info.mtime = int(self._now.timestamp())
        self._tar.addfile(info, io.BytesIO(raw))

    def finish(self) -> None:
        """Write the table of contents, and close the archive."""
        self._write("README.txt", _readme(self).encode())
        self._tar.close()


_HEAD = """A support bundle of an mlx-fleet, for the diagnosis of problems.

Removed: passwords, tokens, API keys, private keys and other secrets; user names in URLs; prompts and answers; home
folders (~) and mail addresses. Never included: hashes of API keys, etcd passwords, request journals, models.
Included: names of machines, nodes, models, deployments and GitSources; addresses, versions, labels, metrics and logs.
Review the contents before you share the bundle.
"""


def _readme(archive: BundleArchive) -> str:
    lines = [_HEAD, "Contents, with sizes in bytes:"]
    lines += [f"{e.size:>10}  {e.name}{f'  ({e.note})' if e.note else ''}" for e in archive.entries]
    lines += [
        "",
        "Missing:" if archive.missing else "Nothing is missing.",
    ]
    lines += [f"  {line}" for line in archive.missing]
    return "\n".join(lines) + "\n"


# Number of agents and gateways that are queried in parallel, and the time limit for each.
_MAX_PARALLEL = 8
_PROCESS_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRequest:
    """Selection of the bundle's contents."""

    has_logs: bool
    nodes: Sequence[str]
    """Nodes whose logs are included; all if empty."""
    tail: int
    """Number of lines of each log."""
    since: str
    """Age limit of log lines, such as 2h; empty for no limit."""

    def params(self) -> dict[str, str]:
        """Return the query parameters of log requests."""
        return {"tail": str(self.tail), **({"since": self.since} if self.since else {})}


class BundleCollector:
    """Collector of one bundle."""

    def __init__(
        self,
        transport: Transport,
        archive: BundleArchive,
        clock: Clock,
        dialer: Dialer | None = None,
    ) -> None:
        """`dialer`: how to dial agents and gateways."""
        self._transport = transport
        self._dialer = dialer or Dialer()
        self._archive = archive
        self._clock = clock

    async def add_fleet(self, address: EtcdAddress, data_dir: Path | None) -> None:
        """Add versions, doctor's findings and all objects. Raises StoreError."""
        client = ComponentVersion(part="fleetctl", version=fleet_version())
        versions = await version_skew.read_versions(self._transport, client)
        self._archive.add_tree(
            "versions.json",
            version_skew.tree(versions, version_skew.warnings(versions)),
        )
        observation = await observe.observe_fleet(
            self._transport, address, self._clock, data_dir, dialer=self._dialer
        )
        self._archive.add_tree("doctor.json", findings_tree(checks.run_checks(observation)))
        for kind in kinds.KINDS:
            try:
                api_objects = await objects.list_all(self._transport, kind.type)
            except UndecodableError as error:
                self._archive.add_missing(f"objects/{kind.plural}.json", str(error))
                continue
            if api_objects:
                trees = [object_tree(obj) for obj in api_objects]
                self._archive.add_tree(f"objects/{kind.plural}.json", trees)
        names = [item.key for item in (await self._transport.list(f"{keys.ROOT}/")).items]
        # Below secret/, even the names are left out.
        shown = [name for name in names if not name.startswith(keys.SECRET_PREFIX)]
        self._archive.add_text("keys.txt", "\n".join(shown) + "\n")

    async def add_processes(self, request: BundleRequest, progress: ProgressLine) -> None:
        """Add metrics, vitals and logs of agents, gateways, reconcilers and dashboards."""
        replicas = await objects.list_all(self._transport, Replica)
        nodes = [
            keys.kind_and_name(item.key)[1]
            for item in (await self._transport.list(keys.status_prefix("Node"))).items
        ]
        unknown = sorted(set(request.nodes) - set(nodes))
        if unknown:
            raise FleetctlError(
                f"there is no node {unknown[0]}; there are {', '.join(nodes) or 'none'}"
            )
        chosen = [name for name in nodes if not request.nodes or name in request.nodes]
        leased = [
            process_address
            for kind in LEASED_HOLDERS.values()
            for process_address in await process_client.list_processes(
                self._transport, kind, self._dialer
            )
        ]
        slots, done = asyncio.Semaphore(_MAX_PARALLEL), 0

        async def collect(
            label: str, address: ProcessAddress | None, paths: dict[str, str]
        ) -> None:
            nonlocal done
            async with slots:
                await self._collect(label, address, paths, request)
            done += 1
            progress.show(f"{done} of {len(chosen) + len(leased)} processes queried")

        async with asyncio.TaskGroup() as group:
            for name in chosen:
                paths = _agent_paths(name, replicas)
                group.create_task(collect(f"node/{name}", await self._agent(name), paths))
            for process_address in leased:
                folder, process = (
                    process_address.label.replace("/", "-"),
                    process_address.label.partition("/")[0],
                )
                paths = {log_path(process): f"{folder}/{process}.log"}
                # A dashboard's are for API keys, not for tickets.
                paths |= {} if process == "dashboard" else {"/metrics": f"{folder}/metrics.txt"}
                group.create_task(collect(process_address.label, process_address, paths))

    async def _agent(self, name: str) -> ProcessAddress | None:
        try:
            return await process_client.find_agent(self._transport, name, self._dialer)
        except ProcessError as error:
            self._archive.add_missing(f"node/{name}", error.message)
            return None

    async def _collect(
        self,
        label: str,
        address: ProcessAddress | None,
        paths: dict[str, str],
        request: BundleRequest,
    ) -> None:
        """Collect everything from one process, within a time limit."""
        if address is None:
            return
        try:
            async with (
                asyncio.timeout(_PROCESS_LIMIT_S),
                issue_ticket(self._transport, address.key) as bearer,
            ):
                for path, name in paths.items():
                    await self._add_file(address, path, name, bearer, request)
        except TimeoutError:
            self._archive.add_missing(label, f"the rest took longer than {_PROCESS_LIMIT_S:.0f} s")
        except StoreError as error:
            self._archive.add_missing(label, f"no ticket could be issued: {error}")

    async def _add_file(
        self, address: ProcessAddress, path: str, name: str, bearer: str, request: BundleRequest
    ) -> None:
        is_log = name.endswith(".log")
        if is_log and not request.has_logs:
            return
        bare, _, query = path.partition("?")
        own_params = dict(part.split("=", 1) for part in query.split("&") if part)
        params = {**own_params, **(request.params() if is_log else {})}
        try:
            raw = await process_client.fetch(address, bare, bearer=bearer, params=params)
        except ProcessError as error:
            is_absent = isinstance(error, ProcessRefusedError) and error.status == _NOT_FOUND
            if not (is_absent and "previous" in params):  # most engines were started once
                self._archive.add_missing(name, error.message)
            return
        if is_log:
            self._archive.add_log(name, raw)
        else:
            self._archive.add_text(name, raw.decode("utf-8", "replace"))


def _agent_paths(node: str, replicas: Sequence[Replica]) -> dict[str, str]:
    """Return the paths to request from an agent, and the file name for each."""
    folder = f"node-{node}"
    paths = {
        "/v1/vitals": f"{folder}/vitals.json",
        "/metrics": f"{folder}/metrics.txt",
        "/v1/logs/agent": f"{folder}/agent.log",
    }
    for replica in replicas:
        for number, rank in enumerate(replica.spec.ranks):
            if rank.node == node:
                query = f"/v1/logs/replicas/{replica.name}?rank={number}"
                paths[query] = f"{folder}/{replica.name}-rank-{number}.log"
                paths[f"{query}&previous=true"] = (
                    f"{folder}/{replica.name}-rank-{number}-previous.log"
                )
    return paths


def add_local_logs(archive: BundleArchive, data_dir: Path, request: BundleRequest) -> None:
    """Add the log files of a fleet that `fleetctl up` runs on this machine."""
    if not request.has_logs:
        return
    for path in (*sorted((data_dir / "logs").glob("*.log")), data_dir / "etcd" / "etcd.log"):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES - 1))
                raw = file.read(LOG_BYTES + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            archive.add_missing(f"local/{path.name}", error.strerror or "cannot be read")
            continue
        archive.add_log(f"local/{path.name}", raw)
