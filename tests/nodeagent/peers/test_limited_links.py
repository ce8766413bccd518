"""Processes in network namespaces with limited links: what the hub sends, how long it takes, and who dies on the way."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from models.model_store.piece_list import PIECE_BYTES
from store import keys
from tests.support import netns
from tests.support.hub import REPO, StandInHub
from tests.support.sharing_fleet import INTERNET, SharingFleet, SharingMac, sharing_fleet
from tests.support.waiting import until_async

pytestmark = [
    pytest.mark.full,
    pytest.mark.etcd,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not netns.available(), reason="needs network namespaces"),
]

MB = 1_000_000


def model(*sizes: int, seed: int = 1) -> dict[str, bytes]:
    """Return the files of a model whose weights have these sizes."""
    randbytes = random.Random(seed).randbytes

    def weights(size: int) -> bytes:
        return b"".join(randbytes(min(size - at, MB)) for at in range(0, size, MB))

    files = {f"model-{number}.safetensors": weights(size) for number, size in enumerate(sizes)}
    return {**files, "config.json": b'{"model_type": "llama"}\n', "tokenizer.json": randbytes(5000)}


def hub_of(files: dict[str, bytes]) -> StandInHub:
    return StandInHub(repos={REPO: files})


def size_of(files: dict[str, bytes]) -> int:
    return sum(map(len, files.values()))


async def test_four_macs_take_little_longer_than_one_and_the_hub_sends_the_model_once(
    tmp_path: Path,
) -> None:
    files = model(340 * MB)
    async with sharing_fleet(tmp_path, hub_of(files), count=5) as fleet:
        source = fleet.reference()
        alone_s = await fleet.pulled([await fleet.add("alone")], source)
        assert alone_s >= size_of(files) / INTERNET * 0.9, "the link is not limited"
        fleet.macs[0].kill()
        fleet.hub.body_bytes = 0
        macs = [await fleet.add(f"mac-{number}") for number in range(4)]
        together_s = await fleet.pulled(macs, source)
        ratio = fleet.hub.body_bytes / size_of(files)
        print(f"alone {alone_s:.1f} s, four {together_s:.1f} s, hub bytes {ratio:.3f} x")
        for mac in macs:
            assert mac.contents(source.folder) == files
        assert ratio <= 1.02
        assert together_s <= max(1.3 * alone_s, alone_s + 5.0)


def hub_asker(fleet: SharingFleet, folder: str) -> SharingMac | None:
    """Return the Mac whose bytes come from the hub; None while there is none."""
    host = fleet.hub.host
    for mac in fleet.macs:
        report = mac.report(folder)
        if report is not None and host in report.source and report.present_bytes:
            return mac
    return None


@pytest.mark.parametrize("percent", [30, 60, 90])
async def test_when_the_mac_that_asks_the_hub_is_killed_little_is_sent_again(
    tmp_path: Path, percent: int
) -> None:
    files = model(200 * MB)
    size = size_of(files)
    async with sharing_fleet(tmp_path, hub_of(files), count=4) as fleet:
        source = fleet.reference()
        macs = [await fleet.add(f"mac-{number}") for number in range(4)]
        for mac in macs:
            mac.pull(source)
        await fleet.wait(lambda: fleet.hub.body_bytes >= size * percent // 100, what=f"{percent} %")
        asker = hub_asker(fleet, source.folder)
        assert asker is not None
        asker.kill()
        others = [mac for mac in macs if mac is not asker]
        await fleet.wait(
            lambda: all(mac.has(source.folder) for mac in others), what="the model on the others"
        )
        ratio = fleet.hub.body_bytes / size
        print(f"killed at {percent} %: hub bytes {ratio:.3f} x")
        for mac in others:
            assert mac.contents(source.folder) == files
        assert ratio <= 1.1


async def test_when_the_hub_goes_the_macs_share_what_is_there_and_say_why_they_wait(
    tmp_path: Path,
) -> None:
    files = model(60 * MB, 30 * MB)
    size = size_of(files)
    async with sharing_fleet(tmp_path, hub_of(files), count=3) as fleet:
        source = fleet.reference()
        macs = [await fleet.add(f"mac-{number}", attempts=3) for number in range(3)]
        for mac in macs:
            mac.pull(source)
        await fleet.wait(lambda: fleet.hub.body_bytes >= size * 60 // 100, what="60 %")
        fleet.hub.faults.status = 503
        fleet.hub.cut()

        def reasons() -> list[str]:
            found = [mac.report(source.folder) for mac in macs]
            return [report.error for report in found if report is not None and report.error]

        await fleet.wait(lambda: len(reasons()) == 3, what="the reasons")
        assert all(reason.startswith("SourceUnreachable: ") for reason in reasons())
        # What one had, all have by then.
        present = [mac.pulls[source.folder].present_bytes for mac in macs]
        print(f"present {[f'{one / size:.2f}' for one in present]}")
        assert min(present) >= 0.95 * max(present)
        fleet.hub.faults.status = 0
        await fleet.pulled(macs, source)
        for mac in macs:
            assert mac.contents(source.folder) == files


async def test_a_mac_whose_disk_flips_a_bit_is_banned_and_its_bytes_are_not_published(
    tmp_path: Path,
) -> None:
    files = model(100 * MB)
    async with sharing_fleet(tmp_path, hub_of(files), count=3) as fleet:
        source = fleet.reference()
        bad, good = await fleet.add("bad"), await fleet.add("good")
        await fleet.pulled([bad, good], source)
        flip_bit(bad, source.folder, "model-0.safetensors", at=50 * MB)
        good.kill()  # else it would be asked, half of the times
        fleet.hub.body_bytes = 0
        late = await fleet.add("late")
        await fleet.pulled([late], source)
        assert late.contents(source.folder) == files
        assert late.banned == {"bad"}
        ratio = fleet.hub.body_bytes / size_of(files)
        print(f"hub bytes {ratio:.3f} x")
        # The piece before the wrong one was kept, and the rest came from the hub.
        assert ratio == pytest.approx(1 - PIECE_BYTES / size_of(files), abs=0.02)

        async def told() -> bool:
            events = (await fleet.store.list(keys.event_prefix("Node/late"))).items
            return any(b"WrongBytes" in event.value and b"bad" in event.value for event in events)

        await until_async(told, what="an event")


def flip_bit(mac: SharingMac, folder: str, name: str, *, at: int) -> None:
    path = (mac.root / folder / name).resolve()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        found = file.read(1)[0]
        file.seek(at)
        file.write(bytes([found ^ 1]))


async def test_two_models_with_the_same_file_get_it_from_the_hub_once(tmp_path: Path) -> None:
    shared, other = model(100 * MB), "mlx-community/Tiny-Again-4bit"
    again = {**shared, "config.json": b'{"model_type": "llama", "again": true}\n'}
    hub = StandInHub(repos={REPO: shared, other: again})
    async with sharing_fleet(tmp_path, hub, count=3) as fleet:
        sources = fleet.reference(), fleet.reference(other)
        macs = [await fleet.add(f"mac-{number}") for number in range(3)]
        for mac, source in zip(macs, sources, strict=False):
            mac.pull(source)
        await fleet.wait(
            lambda: all(m.has(s.folder) for m, s in zip(macs, sources, strict=False)), what="both"
        )
        # The third gets it when nobody fetches any more, for the other model.
        await fleet.pulled([macs[2]], sources[1])
        assert macs[1].contents(sources[1].folder) == again
        assert macs[2].contents(sources[1].folder) == again
        ratio = hub.body_bytes / size_of(shared)
        print(f"hub bytes {ratio:.3f} x")
        assert ratio <= 1.02


async def test_several_macs_fetch_different_files_from_the_hub(tmp_path: Path) -> None:
    files = model(30 * MB, 30 * MB, 30 * MB, 30 * MB)
    async with sharing_fleet(tmp_path, hub_of(files), count=4) as fleet:
        macs = [await fleet.add(f"mac-{number}") for number in range(4)]
        source = fleet.reference()
        await fleet.pulled(macs, source)
        askers = [mac.name for mac in macs if any(fleet.hub.host in one for one in mac.sources)]
        ratio = fleet.hub.body_bytes / size_of(files)
        print(f"asked the hub: {askers}, hub bytes {ratio:.3f} x")
        assert ratio <= 1.02
        clients = {request.client for request in fleet.hub.requests("GET", ".safetensors")}
        assert len(clients) >= 2


async def got(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        assert response.status == 200
        return len(await response.read())


@asynccontextmanager
async def serving_files(fleet: SharingFleet, number: int) -> AsyncIterator[str]:
    """Serve the models folder of a Mac by a process beside its agent; yield the URL."""
    place, port = fleet.networks.place(number), 4100
    words = ("http.server", str(port), "--bind", place.peer_host, "--directory")
    server = await asyncio.create_subprocess_exec(
        *(*place.prefix, sys.executable, "-m", *words, str(fleet.macs[number].root)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://{place.peer_host}:{port}"

    async def answers() -> bool:
        try:
            return await got(f"{url}/blobs/") > 0
        except aiohttp.ClientError:
            return False

    try:
        await until_async(answers, what="the server")
        yield url
    finally:
        server.kill()
        await server.wait()


async def test_the_clients_of_a_mac_that_generates_have_its_network_before_the_files_of_others(
    tmp_path: Path,
) -> None:
    files = model(200 * MB)
    async with sharing_fleet(tmp_path, hub_of(files), count=2) as fleet:
        source = fleet.reference()
        first, second = await fleet.add("first"), await fleet.add("second")
        await fleet.pulled([first], source)
        first.generate()
        began = fleet.networks.received_bytes(1)
        second.pull(source)
        await fleet.wait(
            lambda: fleet.networks.received_bytes(1) > began + 15 * MB, what="the first bytes"
        )
        async with serving_files(fleet, 0) as url:
            before = fleet.networks.received_bytes(1)
            got_bytes = await got(f"{url}/{source.folder}/model-0.safetensors")
            beside = (fleet.networks.received_bytes(1) - before) / got_bytes
        print(f"files beside the client's bytes: {beside:.3f} x")
        # Two streams without a limit have the same.
        assert 0.01 <= beside <= 0.3


async def test_files_cross_the_thunderbolt_cable_and_the_other_network_when_it_is_cut(
    tmp_path: Path,
) -> None:
    files, more = model(60 * MB), model(60 * MB, seed=2)
    hub = StandInHub(repos={REPO: files, "mlx-community/More-4bit": more})
    async with sharing_fleet(tmp_path, hub, count=2, is_cabled=True) as fleet:
        sources = fleet.reference(), fleet.reference("mlx-community/More-4bit")
        first = await fleet.add("mac-0")
        second = await fleet.add("mac-1")
        for source in sources:
            await fleet.pulled([first], source)
        hub.body_bytes, before = 0, fleet.networks.peer_bytes(0)
        await fleet.pulled([second], sources[0])
        crossed = fleet.networks.peer_bytes(0) - before
        print(f"over the cable {crossed / size_of(files):.3f} x")
        assert crossed >= size_of(files)
        assert hub.body_bytes == 0

        fleet.networks.cut_peers(0)
        await fleet.pulled([second], sources[1])
        assert second.contents(sources[1].folder) == more
        assert hub.body_bytes == 0
