"""Gathers what goes into a support bundle. Whoever does not answer is noted, and left out."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetctl import agents, skew, tickets, version
from fleetctl.agents import Holder
from fleetctl.doctor import finding, judging, looking
from fleetctl.errors import FleetctlError
from fleetctl.skew import Running
from fleetctl.support_bundle.archive import LOG_BYTES, Archive
from fleetctl.terminal import Progress
from machinery.clock import Clock
from machinery.version import version as fleet_version
from manifests.tree import tree_of
from reconciler.nodes.state import MLX_LM
from schemas import kinds
from schemas.replica import Replica
from store import keys, objects
from store.codec import UndecodableError
from store.errors import StoreError
from store.port import Transport

# How many agents and gateways are asked at once, and how long each may take for all it has.
_AT_ONCE = 8
_HOLDER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
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


class Gathering:
    """One bundle in the making."""

    def __init__(self, transport: Transport, archive: Archive, clock: Clock) -> None:
        self._transport = transport
        self._archive = archive
        self._clock = clock

    async def fleet(self, address: str, data_dir: Path | None) -> None:
        """Add the versions, the doctor's findings and every object; raises StoreError."""
        ours = Running(part="fleetctl", version=fleet_version())
        found = await version.read(self._transport, ours)
        self._archive.add_tree(
            "versions.json", skew.tree(found, skew.warnings(found, mlx_lm=MLX_LM))
        )
        seen = await looking.look(self._transport, address, self._clock, data_dir)
        self._archive.add_tree("doctor.json", finding.tree(judging.judge(seen)))
        for kind in kinds.KINDS:
            try:
                several = await objects.list_all(self._transport, kind.type)
            except UndecodableError as error:
                self._archive.miss(f"objects/{kind.plural}.json", str(error))
                continue
            if several:
                trees = [tree_of(obj) for obj in several]
                self._archive.add_tree(f"objects/{kind.plural}.json", trees)
        names = [item.key for item in (await self._transport.list(f"{keys.ROOT}/")).items]
        # Below secret/ even names are left out.
        shown = [name for name in names if not name.startswith(keys.SECRET_PREFIX)]
        self._archive.add_text("keys.txt", "\n".join(shown) + "\n")

    async def told(self, wish: Wish, progress: Progress) -> None:
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
        gateways = await agents.gateways(self._transport)
        turns, done = asyncio.Semaphore(_AT_ONCE), 0

        async def one(label: str, holder: Holder | None, paths: dict[str, str]) -> None:
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

    async def _agent(self, name: str) -> Holder | None:
        try:
            return await agents.of_node(self._transport, name)
        except FleetctlError as error:
            self._archive.miss(f"node/{name}", error.message)
            return None

    async def _one(
        self, label: str, holder: Holder | None, paths: dict[str, str], wish: Wish
    ) -> None:
        """Ask one process for all that it has."""
        if holder is None:
            return
        try:
            async with (
                asyncio.timeout(_HOLDER_S),
                tickets.ticket(self._transport, holder.key) as bearer,
            ):
                for path, name in paths.items():
                    await self._ask(holder, path, name, bearer, wish)
        except TimeoutError:
            self._archive.miss(label, f"no more of it within {_HOLDER_S:.0f} s")
        except StoreError as error:
            self._archive.miss(label, f"no ticket to ask it: {error}")

    async def _ask(self, holder: Holder, path: str, name: str, bearer: str, wish: Wish) -> None:
        is_log = name.endswith(".log")
        if is_log and not wish.has_logs:
            return
        bare, _, query = path.partition("?")
        asked = dict(part.split("=", 1) for part in query.split("&") if part)
        params = {**asked, **(wish.params() if is_log else {})}
        try:
            raw = await agents.ask(holder, bare, bearer=bearer, params=params)
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


def local_logs(archive: Archive, data_dir: Path, wish: Wish) -> None:
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
