"""Several agents fetch one model over TLS: the hub sends it once, and wrong bytes are not kept."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
from models.hub.model_hub import ModelHub, folder_name
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
from tests.support.values import present
from tests.support.waiting import until, until_async
from tests.support.world import deployment

CLOCK = SystemClock()
REQUEST = FetchRequest(repo=REPO, commit=COMMIT)
PIECE = 1 << 16
MADE = "fleet/Tiny-1f2e3d4c5b6a-4bit-g64"
WEIGHTS = "model-00001-of-00002.safetensors"
WHOLE = b'"isWhole":true'
OTHER = "model-00002-of-00002.safetensors"


@dataclass(kw_only=True)
class Mac:
    """One agent's store, API and sharing."""

    exchange: ModelExchange
    fetcher: ModelFetcher
    pulls: ModelPulls
    hub: HuggingFaceHub
    running: asyncio.Task[None]
    lease: int

    @property
    def received(self) -> int:
        return self.exchange.share.received.value()

    async def fetch(
        self,
        monitor: FetchMonitor | None = None,
        request: FetchRequest = REQUEST,
        hub: ModelHub | None = None,
    ) -> StoredModel:
        monitor, hub = monitor or FetchMonitor(CLOCK), hub or self.hub
        shared = self.exchange.sources(hub, request.repo, request.commit, monitor)
        async with asyncio.timeout(60), shared as sources:
            return await self.fetcher.fetch(hub, request, monitor=monitor, sources=present(sources))


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
        models, uploads = ModelStore(self.root / name, CLOCK), Uploads(CLOCK)
        exchange = ModelExchange(self.store, CLOCK, credentials, models, uploads)
        exchange.share.stall_s = 10.0
        app = FastAPI()
        app.add_exception_handler(RefusedError, on_refused)
        blobs = BlobRoutes(
            node=name, store=models, uploads=uploads, piece_lists=exchange.piece_lists
        )
        blobs.add_to(app)
        changed = asyncio.Event()
        security = server_security(credentials, frozenset({Role.NODE}), is_insecure=False)
        server = AdminServer(app, CLOCK, ("127.0.0.1", 0), changed.set, security=security)
        lease = await self.store.grant(600)
        limits = FetchLimits(piece_bytes=PIECE, attempts=3)
        fetcher = ModelFetcher(models, CLOCK, limits=limits)
        pulls = ModelPulls(fetcher, HubSettings(), CLOCK, exchange=exchange)

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(server.run())
                group.create_task(pulls.run())
                await changed.wait()
                url = f"https:{server.url.partition(':')[2]}"
                group.create_task(exchange.run(lambda: lease, lambda: url))

        running = self.group.create_task(run())
        mac = Mac(
            exchange=exchange, fetcher=fetcher, pulls=pulls, hub=self.adapter, running=running, lease=lease
        )  # fmt: skip
        self.macs.append(mac)
        await until(lambda: exchange.is_ready, what="sharing")
        return mac

    async def two(self) -> tuple[Mac, Mac]:
        return await self.add("mac-0"), await self.add("mac-1")

    @property
    def wanted_bytes(self) -> int:
        files = self.hub.repos[REPO].items()
        return sum(len(content) for path, content in files if not path.endswith((".py", ".md")))

    def assert_has_weights(self, model: StoredModel) -> None:
        assert files_below(model.folder)[WEIGHTS] == self.hub.repos[REPO][WEIGHTS]

    async def die(self, mac: Mac) -> None:
        """End an agent as its machine would: its lease goes, and its API."""
        mac.running.cancel()
        await self.store.revoke(mac.lease)

    async def shares(self, part: bytes | str) -> list[str]:
        """Return the keys of shares with this in their key or value."""
        items = (await self.store.list(keys.SHARE_PREFIX)).items
        return [
            i.key for i in items if (part in i.key if isinstance(part, str) else part in i.value)
        ]

    async def until_shared(self, part: bytes | str = WHOLE, count: int = 1) -> None:
        """Wait until so many Macs share what has this part; by default a whole model."""

        async def are_shared() -> bool:
            return len(await self.shares(part)) == count

        await until_async(are_shared, what=f"{count} shares with {part!r}")

    async def publish(self, mac: Mac, *, extra: bytes = b"{}") -> StoredModel:
        """Publish a model as the converter's result is, and offer it."""
        store = mac.exchange.store
        store.prepare()
        folder = store.incoming / "made"
        folder.mkdir()
        for path, content in {**servable_files(), "extra.json": extra}.items():
            (folder / path).write_bytes(content)
        model = publish_folder(store, MADE, folder)
        mac.exchange.rescan()
        await self.until_listed(len(await read_listings(self.store, MADE)) + 1)
        return model

    async def until_listed(self, count: int) -> None:
        async def are_listed() -> bool:
            return len(await read_listings(self.store, MADE)) == count

        await until_async(are_listed, what=f"{count} offers")


@asynccontextmanager
async def fleet(root: Path, weights: int = 1 << 10) -> AsyncIterator[Fleet]:
    hub = StandInHub(repos={REPO: tiny_files(weights=weights)})
    async with hub.serve(), open_hub_session() as session, asyncio.TaskGroup() as group:
        made = Fleet(
            root=root,
            hub=hub,
            store=MemoryTransport(CLOCK),
            authority=TestAuthority(root / "ids"),
            adapter=HuggingFaceHub(session, endpoint=hub.endpoint, token=""),
            group=group,
        )
        try:
            yield made
        finally:
            for mac in made.macs:
                mac.running.cancel()


@pytest.mark.ci
async def test_four_macs_fetch_a_model_from_the_hub_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, 6 << 20) as it:
        it.hub.faults.bytes_per_s = 4 << 20
        macs = [await it.add(f"mac-{number}") for number in range(4)]
        models = await asyncio.gather(*(mac.fetch() for mac in macs))
        contents = [files_below(model.folder) for model in models]
        it.assert_has_weights(models[0])
        assert contents == [contents[0]] * 4
        assert it.hub.body_bytes <= 1.02 * it.wanted_bytes


async def test_the_next_mac_goes_on_when_the_one_that_asks_the_hub_dies(tmp_path: Path) -> None:
    async with fleet(tmp_path, 3 << 20) as it:
        bytes_per_s = it.hub.faults.bytes_per_s = 1 << 20
        first, second = await it.two()
        dying = it.group.create_task(first.fetch())
        await until(lambda: it.hub.body_bytes > 0, what="the first one asks the hub")
        waiting = it.group.create_task(second.fetch())
        await until(lambda: second.received > 1 << 20, what="pieces")
        dying.cancel()
        await it.die(first)
        it.assert_has_weights(await waiting)
        # Of each of the two files comes again what the last second had brought.
        assert it.hub.body_bytes - it.wanted_bytes <= 2 * bytes_per_s


async def test_a_mac_that_sends_wrong_bytes_is_banned_and_costs_one_piece(tmp_path: Path) -> None:
    async with fleet(tmp_path, PIECE_BYTES + (3 << 20)) as it:
        bad, good = await it.two()
        digests = {file.path: file.sha256 for file in (await bad.fetch()).files}
        path = bad.exchange.store.blobs / "sha256" / digests[WEIGHTS]
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(PIECE_BYTES + 5)
            file.write(b"wrong")
        await it.until_shared()
        before = it.hub.body_bytes
        it.assert_has_weights(await good.fetch())
        assert good.exchange.share.is_banned("mac-0")
        # The second piece came from the hub, and what a banned node was not asked for.
        assert 0 < it.hub.body_bytes - before <= it.wanted_bytes - PIECE_BYTES

        async def is_reported() -> bool:
            events = (await it.store.list(keys.event_prefix("Node/mac-1"))).items
            return any(b"WrongBytes" in event.value and b"mac-0" in event.value for event in events)

        await until_async(is_reported, what="an event")


async def test_list_of_pieces_that_one_mac_does_not_give_comes_from_another(tmp_path: Path) -> None:
    """Macs with the same model have the same list, by name."""
    async with fleet(tmp_path, PIECE_BYTES + 1) as it:
        first, second = await it.two()
        await first.fetch()
        await it.until_shared()
        key = keys.model_offer_key("mac-0", folder_name(REPO, COMMIT))
        offer = codec.decode(ModelOffer, present(await it.store.get(key)))
        dead = offer.model_copy(update={"url": f"https://127.0.0.1:{free_port()}", "links": ()})
        assert not (await second.exchange.share.piece_list("mac-9", dead)).files
        assert (await second.exchange.share.piece_list("mac-0", offer)).files


async def test_a_mac_gets_a_whole_model_from_another_when_the_hub_goes(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1 << 20) as it:
        first, second = await it.two()
        await first.fetch()
        await it.until_shared()
        before = it.hub.body_bytes
        fetching = it.group.create_task(second.fetch())
        await until(lambda: len(it.hub.requests("GET", "/tree/")) == 2, what="the list of files")
        it.hub.faults.status = 500
        await fetching
        assert (it.hub.body_bytes, second.received) == (before, it.wanted_bytes)


async def test_offers_stay_while_the_models_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many open files, a disk that fails, a folder without the right: the agent goes on."""
    async with fleet(tmp_path, 1 << 18) as it:
        first, second = await it.two()
        await first.fetch()
        await it.until_shared()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        try:
            first.exchange.rescan()
            await until(lambda: "models not offered" in caplog.text, what="the failure")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert len(await it.shares(WHOLE)) == 1
        # And what a person pulls comes from the Macs that have it.
        sent = it.hub.body_bytes
        second.pulls.start(HubReference(repo=REPO, revision=COMMIT, endpoint=it.hub.endpoint))
        await until(lambda: [r.phase for r in second.pulls.reports()] == ["Present"], what="it")
        assert (it.hub.body_bytes, second.received) == (sent, it.wanted_bytes)


async def test_silent_mac_at_head_of_the_queue_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1 << 17) as it:
        silent, mac = await it.two()
        mac.exchange.share.stall_s, mac.exchange.share.silent_s = 0.5, 0.1
        monitor = FetchMonitor(CLOCK)
        shared = silent.exchange.sources(silent.hub, REPO, COMMIT, FetchMonitor(CLOCK))
        async with shared as sources:
            (file,) = (f for f in await it.adapter.files(REPO, COMMIT) if f.path == WEIGHTS)
            async with present(sources).transfer(file):
                await it.until_shared("/fetch/")
                fetching = it.group.create_task(mac.fetch(monitor))
                await until(lambda: "waiting for mac-0" in monitor.waiting, what="the reason")
                await fetching
        assert monitor.waiting == ""


async def test_macs_with_parts_of_a_model_give_the_whole_to_another(tmp_path: Path) -> None:
    """The ranks of a Pipeline have other weight files each; what both need comes from the hub once."""
    shape = TensorShape(dtype="F32", shape=(1,), size=4)
    headers = WeightHeaders(config="{}", files={path: {path: shape} for path in (WEIGHTS, OTHER)})
    async with fleet(tmp_path, 1 << 20) as it:
        macs = [await it.add(f"mac-{number}") for number in range(3)]
        parts = [ModelPart(files=frozenset({path}), headers=headers) for path in (WEIGHTS, OTHER)]
        models = await asyncio.gather(
            *(m.fetch(request=replace(REQUEST, part=p)) for m, p in zip(macs, parts, strict=False))
        )
        assert [set(model.absent) for model in models] == [{OTHER}, {WEIGHTS}]
        assert it.hub.body_bytes <= 1.02 * it.wanted_bytes
        await it.until_shared(b'"isWhole":false', 2)
        assert await it.shares(WHOLE) == []
        before = it.hub.body_bytes
        assert not (await macs[2].fetch()).is_partial
        assert it.hub.body_bytes == before, "the other Macs have everything together"


def hub_of(store: MemoryTransport) -> FleetHub:
    return FleetHub(FleetListings(read=partial(read_listings, store), errors=(StoreError,)))


async def test_a_made_model_is_proven_from_its_listing_and_fetched_from_another_mac(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as it:
        first, second = await it.two()
        made, hub = await it.publish(first), hub_of(it.store)
        assert await hub.resolve(MADE, "main") == made.commit
        plain = deployment()
        source = ModelSource(hub=HubReference(repo=MADE))
        spec = plain.spec.model_copy(update={"model": source})
        wanted = plain.model_copy(update={"spec": spec})
        snapshot = await look_up(hub, wanted, endpoint="", now=CLOCK.now())
        assert (snapshot.commit, snapshot.folder) == (made.commit, made.name)
        assert snapshot.pinned == HubReference(repo=MADE, revision=made.commit)
        assert snapshot.size_bytes == made.size_bytes
        assert snapshot.weights.total_bytes > 0
        model = await second.fetch(request=FetchRequest(repo=MADE, commit=made.commit), hub=hub)
        assert files_below(model.folder) == files_below(made.folder)
        assert it.hub.seen == []
        await it.until_listed(2)


async def test_what_no_mac_offers_is_refused_with_a_reason() -> None:
    hub = hub_of(MemoryTransport(CLOCK))
    with pytest.raises(ModelMissingError, match="no Mac offers fleet/Tiny"):
        await hub.resolve(MADE, "main")
    with pytest.raises(ModelMissingError, match="has no revision dev"):
        await hub.resolve(MADE, "dev")
    with pytest.raises(HubUnreachableError, match="no Mac that is reachable offers"):
        await hub.files(MADE, "ab" * 20)
    with pytest.raises(HubUnreachableError, match="asks hubs only"):
        await FleetHub(FleetListings()).resolve(MADE, "main")


async def test_two_results_of_one_name_need_a_revision(tmp_path: Path) -> None:
    async with fleet(tmp_path) as it:
        first, second = await it.two()
        await it.publish(first, extra=b"[0]")
        made = await it.publish(second, extra=b"[1]")
        with pytest.raises(ListingRefusedError, match="has 2 commits"):
            await hub_of(it.store).resolve(MADE, "main")
        assert len(await hub_of(it.store).files(MADE, made.commit)) == len(made.files)


async def test_a_listing_that_does_not_prove_its_commit_is_not_used(tmp_path: Path) -> None:
    async with fleet(tmp_path) as it:
        made = await it.publish(await it.add("mac-0"))
        (honest,) = await read_listings(it.store, MADE)
        files = (honest.files[0].model_copy(update={"sha256": "0" * 64}), *honest.files[1:])
        forged = honest.model_copy(update={"files": files})

        async def read(repo: str) -> list[ModelListing]:
            return [forged]

        with pytest.raises(HubUnreachableError):
            await FleetHub(FleetListings(read=read)).files(MADE, made.commit)
