"""The exchange of files between one agent and the others: it offers what its store has, and lends its fetches the other agents' files."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Final

from identity.credentials import Credentials
from identity.dialer import Dialer
from machinery.clock import Clock
from models.hub.blob_source import BlobSources
from models.hub.model_hub import ModelHub, folder_name
from models.hub.progress import FetchMonitor
from models.hub.threads import run_in_thread
from models.model_files import ModelUnusableError
from models.model_store.folder_publication import list_model
from models.model_store.store import ModelStore, StoredModel
from nodeagent.peers.links import own_links
from nodeagent.peers.peer_blobs import HttpPeerBlobs
from nodeagent.peers.shared_sources import FleetShare
from nodeagent.peers.tracker import ShareTracker
from nodeagent.peers.uploads import Uploads
from schemas.blob_share import ModelListing, ModelOffer
from schemas.deployment import is_fleet_repo
from schemas.event import ObjectReference
from store import keys
from store.events import EventRecorder
from store.port import Transport

log = logging.getLogger(__name__)

# Models come and go by hand as well; a file that is gone is a 404.
_SCAN_S: Final = 30.0


class ModelExchange:
    """Shares the models of one node. Without `run()`, fetches come from the hub alone."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        credentials: Credentials,
        store: ModelStore,
        uploads: Uploads,
    ) -> None:
        self._clock = clock
        self.store: Final = store
        self.uploads: Final = uploads
        self.node: Final = credentials.identity.name
        self._tracker = ShareTracker(transport, clock, node=self.node)
        self._recorder = EventRecorder(transport, clock, source=f"Node/{self.node}")
        self._peers = HttpPeerBlobs(Dialer(credentials))
        self.share: Final = FleetShare(
            tracker=self._tracker,
            peers=self._peers,
            clock=clock,
            record=self._record,
        )
        self.piece_lists: Final[dict[str, bytes]] = {}
        """The lists of pieces of the models that it offers, by their SHA-256."""
        self.cable_urls: Callable[[], Iterable[str]] = tuple
        """Returns the URLs of the files on Thunderbolt cables; the agent sets it, and `share.fabric`."""
        self._url: Callable[[], str] = lambda: ""
        self._fetching: Counter[str] = Counter()
        """Fetches that run, by folder: a deployment and a person may want the same model."""
        self._listings: dict[str, ModelListing | None] = {}
        """By folder, whose content never changes."""
        self._is_dirty = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """True if this node has an address at which others get its files."""
        return bool(self._url())

    async def run(self, lease: Callable[[], int | None], url: Callable[[], str]) -> None:
        """Offer models forever, under the node's lease and at the URL of its API ("": nowhere)."""
        self._url = url
        async with self._peers.open(), asyncio.TaskGroup() as group:
            group.create_task(self._tracker.run(lease))
            group.create_task(self._recorder.run())
            while True:
                try:
                    # Raises OSError; nothing is withdrawn.
                    lists = await run_in_thread(self._read_piece_lists)
                    self.piece_lists.clear()
                    self.piece_lists.update(
                        {digest: content for digest, content in lists.values() if digest}
                    )
                    stored = {model.name: model for model in await run_in_thread(self.store.models)}
                    here = stored.keys() | set(self._fetching) if self._url() else set()
                    urls = (self._url(), *self.cable_urls())
                    links = own_links(self.share.fabric(), urls)
                    for folder in here:
                        is_whole = folder in lists and folder not in self._fetching
                        offer = ModelOffer(
                            url=urls[0],
                            links=links,
                            is_whole=is_whole,
                            pieces=lists[folder][0] if is_whole else "",
                            listing=await self._listing(stored.get(folder)) if is_whole else None,
                        )
                        self._tracker.say(keys.model_offer_key(self.node, folder), offer)
                    for folder in set(self._tracker.said("have")) - here:
                        self._tracker.withdraw(keys.model_offer_key(self.node, folder))
                except OSError as error:
                    log.warning("models not offered", extra={"why": str(error)})
                try:
                    async with asyncio.timeout(_SCAN_S if url() else 1.0):
                        await self._is_dirty.wait()
                except TimeoutError:
                    continue
                self._is_dirty.clear()

    async def _record(self, about: ObjectReference, reason: str, message: str) -> None:
        await self._recorder.record(about, reason, message, type_="Warning")

    async def urls(self) -> dict[str, str]:
        """Return the addresses of the other agents that share files, by node; none if this node cannot share."""
        if not self._url():
            return {}
        async with self._tracker.watching():
            return self._tracker.urls()

    def _read_piece_lists(self) -> dict[str, tuple[str, bytes]]:
        """Return the list of pieces of each whole model with its SHA-256; both are empty for one without large files."""
        piece_lists: dict[str, tuple[str, bytes]] = {}
        for model in self.store.models():
            if model.is_partial:
                continue
            listed = self.store.piece_list(model)
            content = listed.encode() if listed.files else b""
            piece_lists[model.name] = (sha256(content).hexdigest() if content else "", content)
        return piece_lists

    def rescan(self) -> None:
        """Offer what was added to the store a moment ago."""
        self._is_dirty.set()

    async def _listing(self, model: StoredModel | None) -> ModelListing | None:
        """Return the files of a model that no hub lists; None for the models of hubs."""
        if model is None or not is_fleet_repo(model.repo):
            return None
        if model.name not in self._listings:
            try:
                self._listings[model.name] = await run_in_thread(list_model, model)
            except (ModelUnusableError, ValueError) as error:
                log.warning("model not offered", extra={"model": model.name, "why": str(error)})
                self._listings[model.name] = None
        return self._listings[model.name]

    @asynccontextmanager
    async def sources(
        self, hub: ModelHub, repo: str, commit: str, monitor: FetchMonitor
    ) -> AsyncIterator[BlobSources | None]:
        """Yield the sources of a commit's files while it is fetched; None if this node cannot share.

        `monitor` gets the reason while nothing arrives.
        """
        if not self._url():
            yield None
            return
        folder = folder_name(repo, commit)
        self._fetching[folder] += 1
        self._is_dirty.set()
        try:
            async with self._tracker.watching():
                yield self.share.sources(hub, repo, commit, monitor)
        finally:
            self._fetching[folder] -= 1
            self._fetching += Counter()  # drops what is 0
            self._is_dirty.set()

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus' text format."""
        yield from self.uploads.lines()
        yield from self.share.lines()
