"""The bundle as a file: a compressed tar that is redacted as it is written, and does not grow beyond its limit.

Gathers what goes into a support bundle. Whoever does not answer is noted, and left out.
"""

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
from fleetctl.doctor import checks, observe
from fleetctl.fleets import process_client, version_skew
from fleetctl.fleets.process_client import ProcessAddress
from fleetctl.fleets.version_skew import ComponentVersion
from fleetctl.support_bundle import redaction
from fleetctl.verbs import version
from machinery.clock import Clock
from machinery.version import version as fleet_version
from manifests.trees import object_tree
from reconciler.nodes.node_state import MLX_LM
from schemas import kinds, quantity
from schemas.replica import Replica
from store import keys, objects
from store.codec import UndecodableError
from store.errors import StoreError
from store.port import Transport

# Of one log, the end of it: what went wrong last is there.
LOG_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleEntry:
    """One file of the bundle."""

    name: str
    size: int
    note: str = ""


class BundleArchive:
    """Takes what was gathered; `finish` writes the table of contents."""

    def __init__(self, file: BinaryIO, folder: str, now: datetime, limit_bytes: int) -> None:
        """Write to the file, everything below the folder; `limit_bytes` counts before compression."""
        self._tar = tarfile.open(fileobj=file, mode="w:gz")  # noqa: SIM115 - closed by finish
        self._folder = folder
        self._now = now
        self._left = limit_bytes
        self.entries: list[BundleEntry] = []
        self.missing: list[str] = []
        """What could not be had, and why."""

    def add_tree(self, name: str, found: Any) -> None:
        """Add JSON, redacted."""
        self._add(
            name, orjson.dumps(redaction.redact_tree(found), option=orjson.OPT_INDENT_2) + b"\n"
        )

    def add_text(self, name: str, found: str) -> None:
        """Add text, redacted."""
        self._add(name, redaction.redact_text(found).encode())

    def add_log(self, name: str, raw: bytes) -> None:
        """Add the end of a log, redacted."""
        cut = len(raw) > LOG_BYTES
        if cut:
            # From a whole line on: half of one may be half of a secret.
            raw = raw[-LOG_BYTES:].partition(b"\n")[2]
        clean = redaction.redact_log(raw.decode("utf-8", "replace")).encode()
        self._add(name, clean, note=f"the last {quantity.show(LOG_BYTES)}" if cut else "")

    def miss(self, what: str, why: str) -> None:
        """Remember what could not be had."""
        self.missing.append(redaction.redact_text(f"{what}: {why}"))

    def _add(self, name: str, raw: bytes, note: str = "") -> None:
        if len(raw) > self._left:
            self.missing.append(f"{name}: left out, for the bundle would be larger than --max-size")
            return
        self._left -= len(raw)
        self._write(name, raw)
        self.entries.append(BundleEntry(name=name, size=len(raw), note=note))

    def _write(self, name: str, raw: bytes) -> None:
        info = tarfile.TarInfo(f"{self._folder}/{name}")
        info.size, info.mode = len(raw), 0o600
        info.mtime = int(self._now.timestamp())
        self._tar.addfile(info, io.BytesIO(raw))

    def finish(self) -> None:
        """Write what is in it, and end the file."""
        self._write("README.txt", _readme(self).encode())
        self._tar.close()


_HEAD = """A support bundle of an mlx-fleet, for somebody who helps to find out what is wrong.

Taken out, where it stood: passwords, tokens, API keys, private keys and other secrets; users' names in addresses; what
was asked of models and answered; home folders (~) and mail addresses. It never had API keys' hashes, passwords of etcd,
requests' journals or models.
Still in it: names of machines, nodes, models, deployments and GitSources, addresses, versions, labels, figures and logs.
Look through it before you give it to anybody.
"""


def _readme(archive: BundleArchive) -> str:
    lines = [_HEAD, "What is in it, in bytes:"]
    lines += [f"{e.size:>10}  {e.name}{f'  ({e.note})' if e.note else ''}" for e in archive.entries]
    lines += [
        "",
        "What is not in it:" if archive.missing else "Nothing that was looked for is missing.",
    ]
    lines += [f"  {line}" for line in archive.missing]
    return "\n".join(lines) + "\n"


# How many agents and gateways are asked at once, and how long each may take for all it has.
_AT_ONCE = 8
_PROCESS_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRequest:
    """What is to be in the bundle."""

    has_logs: bool
    nodes: Sequence[str]
    """Whose logs; all if empty."""
    tail: int
    """How many lines of each log."""
    since: str
    """How far back, such as 2h; empty for all that is kept."""

    def params(self) -> dict[str, str]:
        return {"tail": str(self.tail), **({"since": self.since} if self.since else {})}


class BundleCollector:
    """One bundle in the making."""

    def __init__(self, transport: Transport, archive: BundleArchive, clock: Clock) -> None:
        self._transport = transport
        self._archive = archive
        self._clock = clock

    async def fleet(self, address: str, data_dir: Path | None) -> None:
        """Add the versions, the doctor's findings and every object; raises StoreError."""
        ours = ComponentVersion(part="fleetctl", version=fleet_version())
        found = await version.read_versions(self._transport, ours)
        self._archive.add_tree(
            "versions.json", version_skew.tree(found, version_skew.warnings(found, mlx_lm=MLX_LM))
        )
        seen = await observe.observe_fleet(self._transport, address, self._clock, data_dir)
        self._archive.add_tree("doctor.json", checks.findings_tree(checks.run_checks(seen)))
        for kind in kinds.KINDS:
            try:
                several = await objects.list_all(self._transport, kind.type)
            except UndecodableError as error:
                self._archive.miss(f"objects/{kind.plural}.json", str(error))
                continue
            if several:
                trees = [object_tree(obj) for obj in several]
                self._archive.add_tree(f"objects/{kind.plural}.json", trees)
        names = [item.key for item in (await self._transport.list(f"{keys.ROOT}/")).items]
        # Below secret/ even names are left out.
        shown = [name for name in names if not name.startswith(keys.SECRET_PREFIX)]
        self._archive.add_text("keys.txt", "\n".join(shown) + "\n")

    async def told(self, wish: BundleRequest, progress: ProgressLine) -> None:
        """Add what agents and gateways say of themselves, and their logs."""
        replicas = await objects.list_all(self._transport, Replica)
        nodes = [
            keys.kind_and_name(item.key)[1]
            for item in (await self._transport.list(keys.status_prefix("Node"))).items
        ]
        unknown = sorted(set(wish.nodes) - set(nodes))
        if unknown:
            raise FleetctlError(
                f"there is no node {unknown[0]}; there are {', '.join(nodes) or 'none'}"
            )
        chosen = [name for name in nodes if not wish.nodes or name in wish.nodes]
        gateways = await process_client.list_gateways(self._transport)
        turns, done = asyncio.Semaphore(_AT_ONCE), 0

        async def one(label: str, holder: ProcessAddress | None, paths: dict[str, str]) -> None:
            nonlocal done
            async with turns:
                await self._one(label, holder, paths, wish)
            done += 1
            progress.show(f"{done} of {len(chosen) + len(gateways)} agents and gateways asked")

        async with asyncio.TaskGroup() as group:
            for name in chosen:
                paths = _agent_paths(name, replicas)
                group.create_task(one(f"node/{name}", await self._agent(name), paths))
            for gateway in gateways:
                folder = gateway.label.replace("/", "-")
                paths = {
                    "/metrics": f"{folder}/metrics.txt",
                    "/v1/logs/gateway": f"{folder}/gateway.log",
                }
                group.create_task(one(gateway.label, gateway, paths))

    async def _agent(self, name: str) -> ProcessAddress | None:
        try:
            return await process_client.find_agent(self._transport, name)
        except FleetctlError as error:
            self._archive.miss(f"node/{name}", error.message)
            return None

    async def _one(
        self, label: str, holder: ProcessAddress | None, paths: dict[str, str], wish: BundleRequest
    ) -> None:
        """Ask one process for all that it has."""
        if holder is None:
            return
        try:
            async with (
                asyncio.timeout(_PROCESS_LIMIT_S),
                process_client.issue_ticket(self._transport, holder.key) as bearer,
            ):
                for path, name in paths.items():
                    await self._ask(holder, path, name, bearer, wish)
        except TimeoutError:
            self._archive.miss(label, f"no more of it within {_PROCESS_LIMIT_S:.0f} s")
        except StoreError as error:
            self._archive.miss(label, f"no ticket to ask it: {error}")

    async def _ask(
        self, holder: ProcessAddress, path: str, name: str, bearer: str, wish: BundleRequest
    ) -> None:
        is_log = name.endswith(".log")
        if is_log and not wish.has_logs:
            return
        bare, _, query = path.partition("?")
        asked = dict(part.split("=", 1) for part in query.split("&") if part)
        params = {**asked, **(wish.params() if is_log else {})}
        try:
            raw = await process_client.fetch(holder, bare, bearer=bearer, params=params)
        except FleetctlError as error:
            self._archive.miss(name, error.message)
            return
        if is_log:
            self._archive.add_log(name, raw)
        else:
            self._archive.add_text(name, raw.decode("utf-8", "replace"))


def _agent_paths(node: str, replicas: Sequence[Replica]) -> dict[str, str]:
    """Return what an agent is asked for, and the file it becomes."""
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


def add_local_logs(archive: BundleArchive, data_dir: Path, wish: BundleRequest) -> None:
    """Add the logs of a fleet of `fleetctl up`, which are files of this machine."""
    if not wish.has_logs:
        return
    for path in (*sorted((data_dir / "logs").glob("*.log")), data_dir / "etcd" / "etcd.log"):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES - 1))
                raw = file.read(LOG_BYTES + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            archive.miss(f"local/{path.name}", error.strerror or "cannot be read")
            continue
        archive.add_log(f"local/{path.name}", raw)
