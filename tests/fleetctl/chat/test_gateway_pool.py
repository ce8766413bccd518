"""Commands with several gateways: order, dead ones, gateways that die, and gateways known from before."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fleetctl.chat.answer_stream import (
    AnswerPiece,
    AnswerStream,
    GatewayAccess,
    GatewayLostError,
    GatewayUnreachableError,
)
from fleetctl.chat.gateway_pool import GatewayPool
from fleetctl.cli.errors import FleetctlError
from machinery.clock import SystemClock
from machinery.virtual_time import VirtualClock
from machinery.virtual_time import run as run_virtual
from store import keys
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.gateway_engine_scripts import DONE, delta
from tests.support.gateway_fake_engine import Call, FakeEngine, Script, running
from tests.support.gateway_world import World, running_gateway
from tests.support.ports import free_port
from tests.support.tcp_proxy import Fate, TcpProxy
from tests.support.waiting import until_async

A, B, C = "http://a:4000", "http://b:4000", "http://c:4000"


class Gateways:
    """Gateways that are up, down, or die after they have accepted a request; records which were asked."""

    def __init__(self, *, down: str = "", dying: str = "") -> None:
        self.down, self.dying = set(down.split()), set(dying.split())
        self.asked: list[str] = []
        self.said: list[str] = []

    async def request(self, access: GatewayAccess) -> str:
        self.asked.append(access.url)
        if access.url in self.down:
            raise GatewayUnreachableError("down", summary=f"{access.url} does not answer")
        if access.url in self.dying:
            raise GatewayLostError(f"lost {access.url}", access.url)
        return access.url

    def pool(self, *urls: str, others: tuple[str, ...] = ()) -> GatewayPool:
        async def find_others() -> list[GatewayAccess]:
            return [GatewayAccess(url=url) for url in others]

        accesses = [GatewayAccess(url=url) for url in urls]
        return GatewayPool(accesses, VirtualClock(), find_others=find_others if others else None)

    async def send(self, pool: GatewayPool, *, can_resend: bool = True) -> str:
        return await pool.send(self.request, can_resend=lambda: can_resend, say=self.said.append)


def test_the_gateway_that_worked_is_tried_first_the_next_time() -> None:
    async def main() -> None:
        world = Gateways(down=A)
        pool = world.pool(A, B, C)
        assert [await world.send(pool), await world.send(pool)] == [B, B]
        assert world.asked == [A, B, B]
        assert world.said == [f"{A} does not answer; using {B}"]

    run_virtual(main())


def test_gateways_elsewhere_are_looked_up_only_when_the_known_ones_do_not_answer() -> None:
    async def main() -> None:
        world = Gateways()
        pool = world.pool(A, others=(B,))
        assert await world.send(pool) == A
        world.down = {A}
        assert await world.send(pool) == B
        world.down = {A, B}
        with pytest.raises(FleetctlError, match=f"no gateway answers: {B} .*; {A} does not"):
            await world.send(pool)

    run_virtual(main())


def test_a_request_is_sent_again_when_its_gateway_dies_unless_output_was_printed() -> None:
    async def main() -> None:
        world = Gateways(dying=A)
        pool = world.pool(A, B)
        assert await world.send(pool) == B
        assert world.said == [f"lost {A}. Sending the request again"]
        world = Gateways(dying=A)
        pool = world.pool(A, B)
        with pytest.raises(GatewayLostError):
            await world.send(pool, can_resend=False)
        assert (world.asked, pool.url) == ([A], B)

    run_virtual(main())


def test_the_only_gateway_gets_time_to_start_again_after_its_death() -> None:
    async def main() -> None:
        clock, world = VirtualClock(), Gateways(dying=A)
        pool = world.pool(A)

        async def restart() -> None:
            world.dying, world.down = set(), {A}
            await clock.sleep(5)
            world.down = set()

        async with asyncio.TaskGroup() as group:
            sending = group.create_task(world.send(pool))
            await clock.sleep(0.05)
            group.create_task(restart())
        assert sending.result() == A
        assert clock.monotonic() < 7
        # A gateway that was never reached is not waited for, and one that stays away for 15 s at most.
        world.down = {A}
        began_s = clock.monotonic()
        with pytest.raises(GatewayUnreachableError):
            await world.send(pool)
        assert clock.monotonic() == began_s
        world.down, world.dying = set(), {A}
        with pytest.raises(GatewayLostError):
            await world.send(pool)
        assert 15 <= clock.monotonic() - began_s < 17

    run_virtual(main())


async def echoes(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("pong"))
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


@asynccontextmanager
async def served_model(fleet: MemoryFleet, script: Script = echoes) -> AsyncIterator[str]:
    """Run a registered gateway with the model `qwen`; yield its URL."""
    async with running(FakeEngine("qwen-0", script)) as engine, running_gateway(fleet.store) as one:
        await World(fleet.store).serve("qwen", engine)
        await one.knows("qwen", ready=1)

        async def is_registered() -> bool:
            return len((await fleet.store.list(keys.GATEWAY_LEASE_PREFIX)).items) == 1

        await until_async(is_registered, what="the gateway to be registered")
        yield one.url


def ask(*gateways: str) -> Iterator[str]:
    yield from ("chat", "qwen", "-m", "ping")
    for url in gateways:
        yield from ("--gateway", url)


async def test_a_dead_gateway_is_passed_over_with_one_line(
    fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    async with served_model(fleet) as url:
        line = f"{dead} does not answer (Connection refused); using {url}\n"
        done = await run_fleetctl(*ask(dead, url))
        assert (done.code, done.out, done.err) == (0, "pong\n", line)
        done = await run_fleetctl("run", "qwen", "ping", "--gateway", f"{dead},{url}")
        assert (done.out, done.err) == ("pong\n", line)
        monkeypatch.setenv("FLEET_GATEWAY", f"{dead},{url}")
        done = await run_fleetctl(*ask())
        assert (done.out, done.err) == ("pong\n", line)
        done = await run_fleetctl("routes", "-o", "json")
        assert (done.code, "qwen-0" in done.out) == (0, True)
        monkeypatch.delenv("FLEET_GATEWAY")
        urls = ("--gateway", dead, "--gateway", url)
        assert (await run_fleetctl("config", "set-context", "lab", *urls)).code == 0
        done = await run_fleetctl(*ask(), "--context", "lab")
        assert (done.out, done.err) == ("pong\n", line)
    done = await run_fleetctl(*ask(), "--context", "lab")
    assert done.code == 1
    assert done.err.endswith(
        f"error: no gateway answers: {dead} does not answer (Connection refused); {url} does not answer (Connection "
        "refused). Are they running? Give another address with --gateway or FLEET_GATEWAY\n"
    )


async def test_a_question_is_sent_again_when_the_gateway_dies_before_the_answer(
    fleet: MemoryFleet,
) -> None:
    async with served_model(fleet) as url:
        parts = urlsplit(url)
        proxy = TcpProxy(parts.hostname or "", parts.port or 0, SystemClock())
        async with proxy.serving():
            proxy.plan = lambda _: (Fate(), Fate(cut_after=0))
            done = await run_fleetctl(*ask(proxy.url, url))
            assert (done.code, done.out) == (0, "pong\n")
            assert done.err == (
                f"the connection to the gateway at {proxy.url} broke: it was closed in the middle. "
                "Sending the request again\n"
            )


async def test_an_answer_that_has_begun_is_not_repeated(fleet: MemoryFleet) -> None:
    async def tells_a_long_story(call: Call) -> None:
        await call.begin_stream()
        for _ in range(100):
            await call.chunk(delta("once "))
        await asyncio.Event().wait()

    async with (
        running(FakeEngine("m-0", tells_a_long_story)) as engine,
        running_gateway(fleet.store) as gateway,
    ):
        await World(fleet.store).serve("qwen", engine)
        await gateway.knows("qwen", ready=1)
        parts = urlsplit(gateway.url)
        proxy = TcpProxy(parts.hostname or "", parts.port or 0, SystemClock())
        async with proxy.serving():
            proxy.plan = lambda _: (Fate(), Fate(cut_after=5000))
            done = await run_fleetctl(*ask(proxy.url, gateway.url))
        assert (done.code, done.out[:10], len(engine.calls)) == (1, "once once ", 1)
        assert done.err == (
            f"error: the connection to the gateway at {proxy.url} broke: it was closed in the middle. The answer is "
            f"incomplete; send the message again, which goes to {gateway.url}\n"
        )


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss of iproute2")
async def test_a_gateway_without_power_is_noticed_by_tcp_keepalive(fleet: MemoryFleet) -> None:
    async def pauses(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(delta("once "))
        await asyncio.Event().wait()

    def look(_: AnswerPiece) -> None:
        words = ("ss", "--tcp", "--numeric", "--options", f"dport = :{urlsplit(url).port}")
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        raise FleetctlError(shown)

    async with served_model(fleet, pauses) as url:
        body = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        # Without it the system would wait for two hours, and the command for its --timeout.
        with pytest.raises(FleetctlError, match=r"timer:\(keepalive,1[0-9](\.[0-9]+)?sec"):
            await AnswerStream(SystemClock()).read(GatewayAccess(url=url), body, look)


async def test_known_gateways_answer_while_the_store_is_away(
    fleet: MemoryFleet, tmp_path: Path
) -> None:
    file = tmp_path / "known-gateways.json"
    async with served_model(fleet) as url:
        done = await fleet.ctl(*ask())
        assert (done.code, done.err, file.stat().st_mode & 0o777) == (0, "", 0o600)
        fleet.vanish()
        done = await fleet.ctl(*ask())
        assert (done.code, done.out) == (0, "pong\n")
        assert "using the gateways that were known" in done.err
        assert len(done.err.splitlines()) == 1
        assert (await fleet.ctl("routes", "-o", "json")).code == 0
        created = await run_fleetctl("config", "set-context", "lab", "--etcd", fleet.url)
        assert created.code == 0
        shown = await run_fleetctl("config", "get-contexts", "-o", "wide")
        assert shown.out.splitlines()[1].split()[3] == url
        # Another store has not listed them, and a damaged file lists none.
        other = await run_fleetctl(*ask(), "--etcd", "http://127.0.0.1:9")
        assert other.code == 1
        file.write_text("{")
        assert (await fleet.ctl(*ask())).code == 1
