"""Several agents fetch one model over TLS: the hub sends it once, and wrong bytes are not kept."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from fastapi import FastAPI

from identity.credentials import Credentials
from identity.listeners import server_security
from identity.names import Role
from machinery.clock import SystemClock
from machinery.http_server import AdminServer
from models.hub.connection import open_hub_session
from models.hub.errors import HubUnreachableError, ListingRefusedError, ModelMissingError
from models.hub.fetcher import FetchLimits, FetchRequest, ModelFetcher, ModelPart
from models.hub.fleet_hub import FleetHub, FleetListings
from models.hub.hub_settings import HubSettings
from models.hub.huggingface import HuggingFaceHub
from models.hub.model_hub import folder_name
from models.hub.progress import FetchMonitor
from models.model_store.folder_publication import publish_folder
from models.model_store.piece_list import PIECE_BYTES
from models.model_store.store import ModelStore, StoredModel
from models.weight_headers import TensorShape, WeightHeaders
from nodeagent.api.blobs import BlobRoutes
from nodeagent.api.server import on_refused
from nodeagent.model_store.pulls import ModelPulls
from nodeagent.peers.model_exchange import ModelExchange
from nodeagent.peers.uploads import Uploads
from reconciler.services.model_lookup import look_up
from schemas.blob_share import ModelListing, ModelOffer
from schemas.deployment import HubReference, ModelSource
from schemas.wire.errors import RefusedError
from store import codec, keys
from store.errors import StoreError
from store.memory import MemoryTransport
from store.model_listings import read_listings
from tests.support.hub import COMMIT, REPO, StandInHub, tiny_files
from tests.support.hub_repositories import servable_files
from tests.support.identities import TestAuthority
from tests.support.model_store import files_below
from tests.support.ports import free_port
from tests.support.waiting import until, until_async
from tests.support.world import deployment

CLOCK = SystemClock()
REQUEST = FetchRequest(repo=REPO, commit=COMMIT)
PIECE = 1 << 16
MADE = "fleet/Tiny-1f2e3d4c5b6a-4bit-g64"
WEIGHTS = "model-00001-of-00002.safetensors"


def wanted_bytes(hub: StandInHub) -> int:
    return sum(len(c) for p, c in hub.repos[REPO].items() if not p.endswith((".py", ".md")))


@dataclass(kw_only=True)
class Mac:
    """One agent's store, API and sharing."""

    exchange: ModelExchange
    fetcher: ModelFetcher
    pulls: ModelPulls
    hub: HuggingFaceHub
    running: asyncio.Task[None]
    lease: int

    async def fetch(
        self, monitor: FetchMonitor | None = None, request: FetchRequest = REQUEST
    ) -> StoredModel:
        monitor = monitor or FetchMonitor(CLOCK)
        async with self.exchange.sources(self.hub, REPO, COMMIT, monitor) as sources:
            assert sources is not None
            return await self.fetcher.fetch(self.hub, request, monitor=monitor, sources=sources)


@dataclass(kw_only=True)
class Fleet:
    """Agents on one store and one hub."""

    root: Path
    hub: StandInHub
    store: MemoryTransport
    authority: TestAuthority
    adapter: HuggingFaceHub
    group: asyncio.TaskGroup
    macs: list[Mac] = field(default_factory=list)

    async def add(self, name: str) -> Mac:
        credentials = Credentials(self.authority.issue(Role.NODE, name), CLOCK)
        models = ModelStore(self.root / name, CLOCK)
        uploads = Uploads(CLOCK)
        exchange = ModelExchange(self.store, CLOCK, credentials, models, uploads)
        exchange.share.stall_s = 10.0
        app = FastAPI()
        app.add_exception_handler(RefusedError, on_refused)
        BlobRoutes(
            node=name, store=models, uploads=uploads, piece_lists=exchange.piece_lists
        ).add_to(app)
        changed = asyncio.Event()
        server = AdminServer(
            app,
            CLOCK,
            ("127.0.0.1", 0),
            changed.set,
            security=server_security(credentials, frozenset({Role.NODE}), is_insecure=False),
        )
        lease = await self.store.grant(600)

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(server.run())
                group.create_task(pulls.run())
                await changed.wait()
                url = f"https:{server.url.partition(':')[2]}"
                group.create_task(exchange.run(lambda: lease, lambda: url))

        limits = FetchLimits(piece_bytes=PIECE, attempts=3)
        fetcher = ModelFetcher(models, CLOCK, limits=limits)
        pulls = ModelPulls(fetcher, HubSettings(), CLOCK, exchange=exchange)
        mac = Mac(
            exchange=exchange,
            fetcher=fetcher,
            pulls=pulls,
            hub=self.adapter,
            running=self.group.create_task(run()),
            lease=lease,
        )
        self.macs.append(mac)
        await until(lambda: exchange.is_ready, what="sharing")
        return mac

    async def die(self, mac: Mac) -> None:
        """End an agent as its machine would: its lease goes, and its API."""
        mac.running.cancel()
        await self.store.revoke(mac.lease)

    async def offers(self) -> list[str]:
        items = (await self.store.list(keys.SHARE_PREFIX)).items
        return [item.key for item in items if b'"isWhole":true' in item.value]

    async def until_offered(self) -> None:
        """Wait until one Mac offers the whole model."""

        async def offered() -> bool:
            return len(await self.offers()) == 1

        await until_async(offered, what="an offer")


@asynccontextmanager
async def fleet(root: Path, weights: int) -> AsyncIterator[Fleet]:
    hub = StandInHub(repos={REPO: tiny_files(weights=weights)})
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub.serve())
        session = await stack.enter_async_context(open_hub_session())
        adapter = HuggingFaceHub(session, endpoint=hub.endpoint, token="")
        group = await stack.enter_async_context(asyncio.TaskGroup())
        made = Fleet(
            root=root,
            hub=hub,
            store=MemoryTransport(CLOCK),
            authority=TestAuthority(root / "ids"),
            adapter=adapter,
            group=group,
        )
        try:
            yield made
        finally:
            for mac in made.macs:
                mac.running.cancel()


@pytest.mark.ci
async def test_four_macs_fetch_a_model_from_the_hub_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, 6 << 20) as one:
        one.hub.faults.bytes_per_s = 4 << 20
        macs = [await one.add(f"mac-{number}") for number in range(4)]
        async with asyncio.timeout(60):
            models = await asyncio.gather(*(mac.fetch() for mac in macs))
        contents = [files_below(model.folder) for model in models]
        assert contents[0][WEIGHTS] == one.hub.repos[REPO][WEIGHTS]
        assert all(content == contents[0] for content in contents)
        assert one.hub.body_bytes <= 1.02 * wanted_bytes(one.hub)


async def test_the_next_mac_goes_on_when_the_one_that_asks_the_hub_dies(tmp_path: Path) -> None:
    async with fleet(tmp_path, 3 << 20) as one:
        one.hub.faults.bytes_per_s = 1 << 20
        first, second = await one.add("mac-0"), await one.add("mac-1")
        dying = one.group.create_task(first.fetch())
        await until(lambda: one.hub.body_bytes > 0, what="the first one asks the hub")
        waiting = one.group.create_task(second.fetch())
        await until(lambda: second.exchange.share.received.value() > 1 << 20, what="pieces")
        dying.cancel()
        await one.die(first)
        async with asyncio.timeout(60):
            model = await waiting
        assert files_below(model.folder)[WEIGHTS] == one.hub.repos[REPO][WEIGHTS]
        # Of each of the two files comes again what the last second had brought.
        assert one.hub.faults.bytes_per_s
        again = one.hub.body_bytes - wanted_bytes(one.hub)
        assert again <= 2 * one.hub.faults.bytes_per_s


async def test_a_mac_that_sends_wrong_bytes_is_banned_with_an_event(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1 << 20) as one:
        bad, good = await one.add("mac-0"), await one.add("mac-1")
        found = {file.path: file.sha256 for file in (await bad.fetch()).files}
        path = bad.exchange.store.blobs / "sha256" / found[WEIGHTS]
        content = bytearray(path.read_bytes())
        content[1000] ^= 1
        path.chmod(0o644)
        path.write_bytes(content)
        await one.until_offered()
        before = one.hub.body_bytes
        async with asyncio.timeout(60):
            model = await good.fetch()
        assert files_below(model.folder)[WEIGHTS] == one.hub.repos[REPO][WEIGHTS]
        assert good.exchange.share.is_banned("mac-0")
        assert one.hub.body_bytes > before

        async def told() -> bool:
            events = (await one.store.list(keys.event_prefix("Node/mac-1"))).items
            return any(b"WrongBytes" in event.value and b"mac-0" in event.value for event in events)

        await until_async(told, what="an event")


async def test_a_wrong_piece_costs_no_more_than_itself(tmp_path: Path) -> None:
    async with fleet(tmp_path, PIECE_BYTES + (3 << 20)) as one:
        bad, good = await one.add("mac-0"), await one.add("mac-1")
        found = {file.path: file.sha256 for file in (await bad.fetch()).files}
        path = bad.exchange.store.blobs / "sha256" / found[WEIGHTS]
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(PIECE_BYTES + 5)
            file.write(b"wrong")
        await one.until_offered()
        before = one.hub.body_bytes
        async with asyncio.timeout(60):
            model = await good.fetch()
        assert files_below(model.folder)[WEIGHTS] == one.hub.repos[REPO][WEIGHTS]
        assert good.exchange.share.is_banned("mac-0")
        # The second piece came from the hub, and what a banned node was not asked for.
        assert one.hub.body_bytes - before <= wanted_bytes(one.hub) - PIECE_BYTES


async def test_a_list_of_pieces_that_one_mac_does_not_give_comes_from_another(
    tmp_path: Path,
) -> None:
    """Macs with the same model have the same list, by name."""
    async with fleet(tmp_path, PIECE_BYTES + 1) as one:
        first, second = await one.add("mac-0"), await one.add("mac-1")
        await first.fetch()
        key = keys.model_offer_key("mac-0", folder_name(REPO, COMMIT))
        await one.until_offered()
        item = await one.store.get(key)
        assert item is not None
        offer = codec.decode(ModelOffer, item)
        dead = offer.model_copy(update={"url": f"https://127.0.0.1:{free_port()}", "links": ()})
        share = second.exchange.share
        assert not (await share.piece_list("mac-9", dead)).files
        assert (await share.piece_list("mac-0", offer)).files


async def test_a_mac_gets_a_whole_model_from_another_when_the_hub_goes(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, 1 << 20) as one:
        first, second = await one.add("mac-0"), await one.add("mac-1")
        await first.fetch()
        await one.until_offered()
        before = one.hub.body_bytes
        fetching = one.group.create_task(second.fetch())
        await until(lambda: len(one.hub.requests("GET", "/tree/")) == 2, what="the list of files")
        one.hub.faults.status = 500
        async with asyncio.timeout(60):
            await fetching
        assert one.hub.body_bytes == before
        assert second.exchange.share.received.value() == wanted_bytes(one.hub)


async def test_offers_stay_while_the_models_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many open files, a disk that fails, a folder without the right: the agent goes on."""
    async with fleet(tmp_path, 1 << 18) as one:
        first, second = await one.add("mac-0"), await one.add("mac-1")
        await first.fetch()
        await one.until_offered()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        try:
            first.exchange.rescan()
            await until(lambda: "models not offered" in caplog.text, what="the failure")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert len(await one.offers()) == 1
        async with asyncio.timeout(60):
            await second.fetch()


async def test_what_a_person_pulls_comes_from_the_macs_that_have_it(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1 << 18) as one:
        first, second = await one.add("mac-0"), await one.add("mac-1")
        await first.fetch()
        await one.until_offered()
        before = one.hub.body_bytes
        second.pulls.start(HubReference(repo=REPO, revision=COMMIT, endpoint=one.hub.endpoint))
        await until(
            lambda: any(report.phase == "Present" for report in second.pulls.reports()),
            what="the model",
        )
        assert one.hub.body_bytes == before
        assert second.exchange.share.received.value() == wanted_bytes(one.hub)


async def test_a_silent_mac_at_the_head_of_the_queue_is_not_waited_for_for_ever(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, 1 << 17) as one:
        silent, mac = await one.add("mac-0"), await one.add("mac-1")
        mac.exchange.share.stall_s, mac.exchange.share.silent_s = 0.5, 0.1
        monitor = FetchMonitor(CLOCK)
        async with silent.exchange.sources(
            silent.hub, REPO, COMMIT, FetchMonitor(CLOCK)
        ) as sources:
            assert sources is not None
            (file,) = (f for f in await one.adapter.files(REPO, COMMIT) if f.path == WEIGHTS)
            async with sources.transfer(file), asyncio.timeout(60):
                await asyncio.wait_for(_claimed(one), 10)
                fetching = one.group.create_task(mac.fetch(monitor))
                await until(lambda: "waiting for mac-0" in monitor.waiting, what="the reason")
                await fetching
        assert monitor.waiting == ""


async def _claimed(one: Fleet) -> None:
    async def claim() -> bool:
        return any(
            "/fetch/" in item.key for item in (await one.store.list(keys.SHARE_PREFIX)).items
        )

    await until_async(claim, what="a claim")


async def test_macs_with_parts_of_a_model_give_the_whole_to_another(tmp_path: Path) -> None:
    """The ranks of a Pipeline have other weight files each; what both need comes from the hub once."""
    other = "model-00002-of-00002.safetensors"
    shape = TensorShape(dtype="F32", shape=(1,), size=4)
    headers = WeightHeaders(config="{}", files={path: {path: shape} for path in (WEIGHTS, other)})
    async with fleet(tmp_path, 1 << 20) as one:
        macs = [await one.add(f"mac-{number}") for number in range(3)]
        parts = [ModelPart(files=frozenset({path}), headers=headers) for path in (WEIGHTS, other)]
        async with asyncio.timeout(60):
            models = await asyncio.gather(
                *(
                    mac.fetch(request=replace(REQUEST, part=part))
                    for mac, part in zip(macs, parts, strict=False)
                )
            )
        assert [set(model.absent) for model in models] == [{other}, {WEIGHTS}]
        assert one.hub.body_bytes <= 1.02 * wanted_bytes(one.hub)

        async def offered() -> bool:
            found = (await one.store.list(keys.SHARE_PREFIX)).items
            return sum(b'"isWhole":false' in item.value for item in found) == 2

        await until_async(offered, what="offers of parts, which are not of the whole")
        assert await one.offers() == []
        before = one.hub.body_bytes
        async with asyncio.timeout(60):
            model = await macs[2].fetch()
        assert not model.is_partial
        assert one.hub.body_bytes == before, "the other Macs have everything together"


def hub_of(store: MemoryTransport) -> FleetHub:
    return FleetHub(FleetListings(read=partial(read_listings, store), errors=(StoreError,)))


def make_model(store: ModelStore, *, extra: bytes = b"{}") -> StoredModel:
    """Publish a model as the converter's result is."""
    store.prepare()
    folder = store.incoming / "made"
    folder.mkdir()
    for path, content in {**servable_files(), "extra.json": extra}.items():
        (folder / path).write_bytes(content)
    return publish_folder(store, MADE, folder)


async def listed(one: Fleet, count: int) -> None:
    async def look() -> bool:
        return len(await read_listings(one.store, MADE)) == count

    await until_async(look, what=f"{count} offers")


async def fetch_made(one: Fleet, mac: Mac, commit: str) -> StoredModel:
    hub = hub_of(one.store)
    monitor = FetchMonitor(CLOCK)
    async with mac.exchange.sources(hub, MADE, commit, monitor) as sources, asyncio.timeout(60):
        request = FetchRequest(repo=MADE, commit=commit)
        return await mac.fetcher.fetch(hub, request, sources=sources)


async def test_another_mac_gets_the_model_and_offers_it_too(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1 << 10) as one:
        first, second = await one.add("mac-0"), await one.add("mac-1")
        made = make_model(first.exchange.store)
        first.exchange.rescan()
        await listed(one, 1)
        assert await hub_of(one.store).resolve(MADE, "main") == made.commit
        model = await fetch_made(one, second, made.commit)
        assert files_below(model.folder) == files_below(made.folder)
        assert one.hub.seen == []
        await listed(one, 2)


async def test_the_memory_is_proven_from_the_listing_before_a_byte_is_fetched(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, 1 << 10) as one:
        mac = await one.add("mac-0")
        made = make_model(mac.exchange.store)
        mac.exchange.rescan()
        await listed(one, 1)
        plain = deployment()
        model = ModelSource(hub=HubReference(repo=MADE))
        wanted = plain.model_copy(update={"spec": plain.spec.model_copy(update={"model": model})})
        snapshot = await look_up(hub_of(one.store), wanted, endpoint="", now=CLOCK.now())
        assert (snapshot.commit, snapshot.folder) == (made.commit, made.name)
        assert snapshot.pinned == HubReference(repo=MADE, revision=made.commit)
        assert snapshot.size_bytes == made.size_bytes
        assert snapshot.weights.total_bytes > 0


async def test_what_no_mac_offers_is_refused_with_a_reason(tmp_path: Path) -> None:
    store = MemoryTransport(CLOCK)
    hub = hub_of(store)
    with pytest.raises(ModelMissingError, match="no Mac offers fleet/Tiny"):
        await hub.resolve(MADE, "main")
    with pytest.raises(ModelMissingError, match="has no revision dev"):
        await hub.resolve(MADE, "dev")
    with pytest.raises(HubUnreachableError, match="no Mac that is reachable offers"):
        await hub.files(MADE, "ab" * 20)
    with pytest.raises(HubUnreachableError, match="asks hubs only"):
        await FleetHub(FleetListings()).resolve(MADE, "main")


async def test_two_results_of_one_name_need_a_revision(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1 << 10) as one:
        macs = [await one.add(f"mac-{number}") for number in range(2)]
        made = [make_model(m.exchange.store, extra=b"[%d]" % n) for n, m in enumerate(macs)]
        for mac in macs:
            mac.exchange.rescan()
        await listed(one, 2)
        with pytest.raises(ListingRefusedError, match="has 2 commits"):
            await hub_of(one.store).resolve(MADE, "main")
        assert len(await hub_of(one.store).files(MADE, made[1].commit)) == len(made[1].files)


async def test_a_listing_that_does_not_prove_its_commit_is_not_used(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1 << 10) as one:
        mac = await one.add("mac-0")
        made = make_model(mac.exchange.store)
        mac.exchange.rescan()
        await listed(one, 1)
        (honest,) = await read_listings(one.store, MADE)
        files = (honest.files[0].model_copy(update={"sha256": "0" * 64}), *honest.files[1:])
        forged = honest.model_copy(update={"files": files})

        async def read(repo: str) -> list[ModelListing]:
            return [forged]

        hub = FleetHub(FleetListings(read=read))
        with pytest.raises(HubUnreachableError):
            await hub.files(MADE, made.commit)
