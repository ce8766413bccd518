"""Macs that share the files of models: each a process in a network namespace, with links of limited rates.

The hub is across the link to the internet, which all share; etcd is in the local network. Needs root on Linux.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from identity.names import Role
from machinery import processes
from machinery.clock import SystemClock
from models.model_store.store import ModelStore
from schemas.deployment import HubReference
from schemas.wire.stored_models import ModelFetchReport
from store.etcd.connect import connect
from store.port import Transport
from tests.support.cluster import Place, running_cluster
from tests.support.hub import COMMIT, REPO, StandInHub
from tests.support.identities import TestAuthority
from tests.support.netns import Networks
from tests.support.sharing_mac import Settings
from tests.support.waiting import until

CLOCK = SystemClock()
INTERNET = 20_000_000
LAN = 100_000_000
_API_PORT = 4001
_KILLED = -signal.SIGKILL


@dataclass(slots=True)
class SharingMac:
    """One process, and what it has printed last."""

    name: str
    root: Path
    child: asyncio.subprocess.Process
    log: Path
    is_ready: bool = False
    orders: int = 0
    """The number of pulls that it was given."""
    pulls: dict[str, ModelFetchReport] = field(default_factory=dict)
    banned: frozenset[str] = frozenset()
    renewals: int = 0
    late_s: float = 0.0
    """The most that a renewal of its lease was late."""
    losses: int = 0
    """Leases that it has lost."""
    sources: set[str] = field(default_factory=set)
    """Hosts and nodes that its bytes came from."""

    def pull(self, source: HubReference) -> None:
        assert self.child.stdin is not None
        self.pulls.pop(source.folder, None)
        self.orders += 1
        self.child.stdin.write(source.model_dump_json(by_alias=True).encode() + b"\n")

    def generate(self) -> None:
        """Let it send files as while an engine of the Mac generates, from now on."""
        assert self.child.stdin is not None
        self.child.stdin.write(b"busy\n")

    def report(self, folder: str) -> ModelFetchReport | None:
        return self.pulls.get(folder)

    def has(self, folder: str) -> bool:
        """Return whether the pull ended well."""
        pull = self.pulls.get(folder)
        assert pull is None or not pull.error, f"{self.name}: {pull.error}"
        return pull is not None and pull.phase == "Present"

    def kill(self) -> None:
        """Kill it as a power cut would."""
        self.child.send_signal(signal.SIGKILL)

    async def follow(self) -> None:
        """Read what it prints, until its end."""
        assert self.child.stdout is not None
        while line := await self.child.stdout.readline():
            tree = json.loads(line)
            self.is_ready, self.banned = tree["ready"], frozenset(tree["banned"])
            self.renewals, self.losses = tree["renewals"], tree["losses"]
            self.late_s = tree["late_s"]
            # A report of before the last order would tell the end of an earlier pull.
            for one in tree["pulls"] if tree["orders"] == self.orders else ():
                report = ModelFetchReport.model_validate_json(json.dumps(one))
                self.pulls[report.name] = report
                if report.source:
                    self.sources.add(report.source)

    def contents(self, folder: str) -> dict[str, bytes]:
        model = self.root / folder
        return {str(p.relative_to(model)): p.read_bytes() for p in model.rglob("*") if p.is_file()}


async def start_mac(settings: Settings, root: Path, prefix: Sequence[str] = ()) -> SharingMac:
    """Start a process; `follow()` must run."""
    log = root / f"{settings.name}.log"
    with log.open("wb") as errors:
        child = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, "-m", "tests.support.sharing_mac", settings.words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    return SharingMac(settings.name, root / settings.name, child, log)


@dataclass(kw_only=True)
class SharingFleet:
    """The Macs, the hub and the store."""

    root: Path
    networks: Networks
    hub: StandInHub
    etcd_url: str
    store: Transport
    authority: TestAuthority
    group: asyncio.TaskGroup
    is_cabled: bool
    """True if the Macs' addresses are in the network of the clients, and that of the members is a Thunderbolt cable."""
    macs: list[SharingMac] = field(default_factory=list)

    async def add(self, name: str, *, attempts: int = 4) -> SharingMac:
        """Start the next Mac, and wait until it shares."""
        number = len(self.macs)
        place = self.networks.place(number)
        if self.is_cabled:
            self.networks.rename_peer_leg(number, "thunderbolt0")
        settings = Settings(
            name=name,
            root=str(self.root / name),
            identity=str(self.authority.issue(Role.NODE, name).path),
            address=place.client_host if self.is_cabled else place.peer_host,
            port=_API_PORT,
            etcd=self.etcd_url,
            attempts=attempts,
            speed_mbps=LAN * 8 // 1_000_000,
        )
        mac = await start_mac(settings, self.root, place.prefix)
        self.macs.append(mac)
        self.group.create_task(mac.follow())
        await until(lambda: mac.is_ready, limit_s=120, what=f"{name} shares; {self.words()}")
        return mac

    def words(self) -> str:
        return "\n".join(f"{mac.name}: {processes.last_lines(mac.log, 5)}" for mac in self.macs)

    def reference(self, repo: str = REPO, commit: str = COMMIT) -> HubReference:
        return HubReference(repo=repo, revision=commit, endpoint=self.hub.endpoint)

    async def wait(
        self, condition: Callable[[], object], *, what: str, limit_s: float = 120.0
    ) -> None:
        """Wait for a condition; if it does not come true, show what the processes have logged."""

        def look() -> bool:
            ended = [mac.name for mac in self.macs if mac.child.returncode not in (None, _KILLED)]
            assert not ended, f"{ended} ended"
            return bool(condition())

        try:
            await until(look, limit_s=limit_s, what=what)
        except AssertionError as error:
            states = "\n".join(f"{mac.name}: {mac.pulls}" for mac in self.macs)
            raise AssertionError(f"{error}\n{states}\n{self.words()}") from error

    async def pulled(self, macs: Sequence[SharingMac], source: HubReference) -> float:
        """Let the Macs pull a model; return after how many seconds all have it."""
        began = CLOCK.monotonic()
        for mac in macs:
            mac.pull(source)
        await self.wait(lambda: all(mac.has(source.folder) for mac in macs), what="all models")
        return CLOCK.monotonic() - began

    def stored(self, mac: SharingMac) -> ModelStore:
        return ModelStore(mac.root, CLOCK)


@asynccontextmanager
async def sharing_fleet(
    root: Path, hub: StandInHub, *, count: int, is_cabled: bool = False
) -> AsyncIterator[SharingFleet]:
    """Run a hub, an etcd and room for `count` Macs; end everything afterwards."""
    with Networks(count).made() as networks:
        etcd_host = networks.client_address(1) if is_cabled else networks.join_peers()
        networks.limit_clients(INTERNET)
        networks.limit_peers(LAN)
        hub.host = networks.client_address(1)
        async with (
            running_cluster(root, places=(Place(client_host=etcd_host),)) as cluster,
            hub.serve(),
            asyncio.TaskGroup() as group,
        ):
            store = connect(cluster.address())
            fleet = SharingFleet(
                root=root,
                networks=networks,
                hub=hub,
                etcd_url=cluster.members[0].url,
                store=store,
                authority=TestAuthority(root / "ids"),
                group=group,
                is_cabled=is_cabled,
            )
            try:
                yield fleet
            finally:
                for mac in fleet.macs:
                    if mac.child.returncode is None:
                        mac.kill()
                    await mac.child.wait()
                await store.close()
