"""Two Macs that find each other on the network: `fleetctl join` without an address, on real processes and multicast."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.two_macs import MARKS, Mac, two_macs
from tests.support.waiting import until_async

pytestmark = [*MARKS, pytest.mark.timeout(300)]


@pytest.fixture
async def macs(tmp_path: Path, models_dir: Path) -> AsyncIterator[tuple[Mac, Mac]]:
    async with two_macs(tmp_path, models_dir) as (first, second):
        await first.up()
        yield first, second


async def heard(mac: Mac) -> list[dict[str, object]]:
    done = await mac.run("discover", "--source=mdns", "--timeout=2", "-o", "json")
    assert done.code == 0, done.err
    return [load["spec"] for load in json.loads(done.out)["items"]]


async def token(first: Mac) -> str:
    made = await first.ok("token", "create", "--role", "gateway", "-o", "token")
    return made.strip()


async def join(first: Mac, second: Mac, name: str, *words: str) -> None:
    """Join with a token and without an address."""
    folder = second.root / name / "identity"
    more = ("--name", name, "--identity-dir", str(folder), "--timeout=20", *words)
    done = await second.run("join", "-", *more, stdin=(await token(first)).encode())
    assert done.code == 0, done.err
    assert f"gateway/{name} joined the fleet" in done.out


async def is_new_heard(mac: Mac) -> bool:
    return any(one["role"] == "new" for one in await heard(mac))


async def multicast_level(first: Mac, second: Mac) -> dict[str, str]:
    """Return what the doctor finds on the second Mac's network; the store's socket is in a folder that both see."""
    done = await second.run("doctor", "-o", "json", "--data-dir", str(first.data))
    found = json.loads(done.out)["findings"]
    return {one["level"]: one["message"] for one in found if one["check"] == "multicast"}


async def test_a_mac_finds_its_fleet_on_the_network(macs: tuple[Mac, Mac]) -> None:
    first, second = macs
    roles = {(one["role"], one["host"], one["tls"]) for one in await heard(second)}
    assert roles == {("control", first.address, True), ("gateway", first.address, True)}
    assert list(await multicast_level(first, second)) == ["OK"]
    assert await multicast_level(first, first) == {}  # no other machine announces a gateway
    await join(first, second, "edge-1")

    # Without a token, too: the administrator sees it, and compares the words.
    second.start("waiting", sys.executable, "-m", "fleetctl", "join", "--name", "mac-9", "--force",
                 "--identity-dir", str(second.root / "waiting" / "identity"))  # fmt: skip
    begun = asyncio.get_running_loop().time()

    async def is_listed() -> bool:
        return "mac-9" in await first.ok("get", "joinrequests")

    await until_async(is_listed, limit_s=20, what="the machine in the list")
    print(f"listed after {asyncio.get_running_loop().time() - begun:.1f} s")
    await until_async(lambda: is_new_heard(first), limit_s=20, what="its announcement")

    # A machine whose request does not arrive is listed as well.
    second.start("peer", sys.executable, "-m", "tests.support.mdns_peer", "new", "mac-8", "9")

    async def is_heard() -> bool:
        rows = (await first.ok("get", "joinrequests")).splitlines()
        cells = [row.split() for row in rows]
        assert ["mac-9", "Heard"] not in [[row[1], row[-2]] for row in cells]  # it has asked
        return ["<none>", "mac-8", "Heard"] in [[row[0], row[1], row[-2]] for row in cells]

    await until_async(is_heard, limit_s=20, what="the machine that is only heard of")

    # The network drops multicast: nothing is heard, and a seed is enough.
    assert second.networks is not None
    second.networks.drop_multicast()
    assert {one["role"] for one in await heard(second)} == {"new"}  # itself
    lost = await multicast_level(first, second)
    assert " answers on c0, and nothing is heard of its announcements" in lost["WARN"]
    seeds = second.root / "seeds.yaml"
    seeds.write_text(f"seeds: [{first.address}:4001, {first.address}]\n")
    await join(first, second, "edge-2", "--seeds", str(seeds))
    assert second.children["waiting"].running()
