"""A fleet that was started by hand moves to mutual TLS and back while it serves, on an address that others can reach."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.support import netns
from tests.support.fleet import Fleet, model_deployment
from tests.support.fleet_load import rolled_out, under_load
from tests.support.waiting import until_async

pytestmark = [
    pytest.mark.full,
    pytest.mark.fleet,
    pytest.mark.etcd,
    pytest.mark.mlx,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not netns.available(), reason="needs an address in a network"),
]

NODES = ("node-1", "node-2")
MANIFEST = model_deployment(replicas=2, contextLength=512, placement={"spreadBy": ["fleet/node"]})


@pytest.fixture
def address() -> Iterator[str]:
    """Return an address of this machine that is not a loopback one."""
    with netns.Networks(1).made() as networks:
        host, _, _ = networks.place(0).client_host.rpartition(".")
        yield f"{host}.1"


class HandMadeFleet(Fleet):
    """A fleet whose processes are started by hand, first without identities."""

    address: str = ""

    def start_all(self, *, is_insecure: bool) -> None:
        """Start reconciler, agents and gateway, each with a folder for its identity."""
        authority = self.root / "authority"
        signs = ("--authority-dir", str(authority)) if authority.exists() else ()
        self.start_reconciler(
            *signs, "--identity-dir", str(self.root / "reconciler"), "--api-port", "0"
        )
        insecure = ("--insecure-engines", "--insecure-http") if is_insecure else ()
        for name in NODES:
            self.start_agent(name, "--address", self.address, *insecure)
        self.start_gateway("--identity-dir", str(self.root / "gateway"))

    async def restart_all(self, *, is_insecure: bool) -> None:
        """Restart everything but the engines and etcd."""
        for name in ("gateway", *NODES, "reconciler"):
            self.kill(name)
            await self.ended(name)
        self.start_all(is_insecure=is_insecure)

    async def secure(self, *words: str) -> str:
        done = await self.ctl("secure", *words, limit_s=200)
        assert done.code == 0, done.err + done.out + self.words()
        return done.out

    async def shows(self, text: str, *, limit_s: float = 60.0) -> None:
        """Wait until `secure status` shows the text."""

        async def look() -> bool:
            return text in await self.secure("status")

        await until_async(look, limit_s=limit_s, what=text)

    async def has_certificates(self) -> None:
        """Wait until every process has got its first certificate."""
        folders = [self.root / name / "identity" for name in NODES]
        folders += [self.root / "gateway", self.root / "reconciler"]

        async def look() -> bool:
            return all((folder / "identity.pem").exists() for folder in folders)

        await until_async(look, limit_s=60, what="first certificates")

    async def urls(self) -> list[str]:
        done = await self.ctl("get", "endpoints", "-o", "jsonpath={.items[*].spec.url}")
        return done.out.split()

    async def is_plain(self) -> bool:
        """Return whether gateways dial all engines without TLS."""
        return {url.partition(":")[0] for url in await self.urls()} == {"http"}


@asynccontextmanager
async def hand_made_fleet(root: Path, models: Path, address: str) -> AsyncIterator[HandMadeFleet]:
    fleet = HandMadeFleet(root, models)
    fleet.address = address
    try:
        await fleet.etcd.start()
        fleet.start_all(is_insecure=True)
        await fleet.joined(len(NODES))
        yield fleet
    finally:
        await fleet.stop()


async def is_plain_answered(url: str) -> bool:
    """Return whether an engine answers plain HTTP from a machine without a certificate."""
    plain = url.replace("https:", "http:")
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{plain}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer,
        ):
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def test_the_modes_change_under_load_without_a_failed_request(
    tmp_path: Path, models_dir: Path, address: str
) -> None:
    async with hand_made_fleet(tmp_path, models_dir, address) as fleet:
        await fleet.applied(MANIFEST)
        await fleet.available("tiny")
        await fleet.routed("tiny", 2)
        assert await fleet.is_plain()
        made = await fleet.secure("--authority-dir", str(tmp_path / "authority"))
        assert "TLS mode permissive" in made
        refused = await fleet.ctl("secure", "--mode", "tls", "--timeout=0s")
        assert refused.code == 1
        assert "agent of node node-1" in refused.err
        await fleet.restart_all(is_insecure=True)  # each process asks for its first certificate
        await fleet.has_certificates()
        await fleet.restart_all(is_insecure=False)  # and uses it
        await fleet.shows("ready: fleetctl secure --mode tls")
        await fleet.routed("tiny", 2)
        async with under_load(fleet, pause_s=0.05) as asked:
            assert await fleet.secure("--mode", "tls")
            stuck = await fleet.ctl("secure", "--mode", "strict", "--timeout=2s")
            assert stuck.code == 1
            assert "fleetctl rollout restart modeldeployment/tiny" in stuck.err
            restarted = await fleet.ctl("rollout", "restart", "md/tiny")
            assert restarted.code == 0, restarted.err
            await rolled_out(fleet)
            await fleet.secure("--mode", "strict")
            urls = await fleet.urls()
            assert {url.partition(":")[0] for url in urls} == {"https"}
            assert [await is_plain_answered(url) for url in urls] == [False, False]
            back = await fleet.secure("--mode", "permissive")
            assert re.findall(r"^TLS mode (\w+)$", back, re.MULTILINE) == ["tls", "permissive"]
            await until_async(fleet.is_plain, limit_s=30, what="plain endpoints")
            again = await fleet.secure("--mode", "strict")
            assert "every process follows TLS mode strict" in again
        assert len(asked) > 50
