"""The sources of a model's files in a fleet: other agents that have them, and the hub for the first in each queue."""

import hashlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from machinery.clock import Clock
from machinery.prometheus import Counter
from models.hub.blob_source import BlobTransfer
from models.hub.model_hub import ModelHub, RemoteFile, folder_name
from models.hub.progress import FetchMonitor
from models.hub.threads import run_in_thread
from models.model_store.piece_list import PIECE_BYTES, PieceList
from nodeagent.peers.links import Route, routes
from nodeagent.peers.peer_blobs import PeerBlobs, PeerError
from nodeagent.peers.tracker import ShareTracker
from schemas.blob_share import FetchClaim, ModelOffer
from schemas.event import ObjectReference
from schemas.node import NodeFabric
from store import keys
from store.errors import StoreError

log = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

BAN_S: Final = 3600.0
"""Seconds for which a node that sent wrong bytes is not asked."""
_KEPT_LISTS: Final = 32
_NO_LIST: Final = PieceList({})
_CHUNK_BYTES: Final = 1 << 20
_ASKED_AT_ONCE: Final = 8
_POLL_S: Final = 0.25
# Seconds until a node is asked again, by its answer.
_PAUSES: Final = {404: 2.0, 416: _POLL_S, 429: 0.5}
# A node without a free place is waited for, rather than asking the hub.
_BUSY_S: Final = 2.0
_FAILED_S: Final = 5.0
# A node that gave no list of pieces is asked for it again after so long.
_FAILED_LIST_S: Final = 60.0
# A node that does not answer on its cable is asked over another network so long.
_FAILED_URL_S: Final = 60.0
# If no node has a further byte for so long, the next in the queue asks the hub as well.
_STALL_S: Final = 60.0
_SILENT_S: Final = 3.0
# Smaller files are not worth a question to nodes that have other models only.
_WORTH_ASKING_BYTES: Final = 1 << 20
# Without etcd, a place in the queue is waited for so long.
_PLACE_S: Final = 10.0


@dataclass(kw_only=True)
class FleetShare:
    """State and ports that the fetches of one agent share."""

    tracker: ShareTracker
    peers: PeerBlobs
    clock: Clock
    record: Callable[[ObjectReference, str, str], Awaitable[None]]
    """Writes an event."""
    fabric: Callable[[], NodeFabric] = NodeFabric
    """Returns the networks of this node; an agent sets it."""
    stall_s: float = _STALL_S
    silent_s: float = _SILENT_S
    """Seconds without a byte after which the progress says what is waited for."""
    failed_urls: dict[str, float] = field(default_factory=dict)
    """The time until which a URL is not used, by the monotonic clock."""
    banned: dict[str, float] = field(default_factory=dict)
    """The end of each ban by node, by the monotonic clock."""
    lists: dict[str, PieceList] = field(default_factory=dict)
    """Lists of pieces by their SHA-256."""
    unread_lists: dict[tuple[str, str], float] = field(default_factory=dict)
    """The time until which a node is not asked again for a list that it did not give."""
    received: Counter = field(
        default_factory=lambda: Counter(
            "fleet_blob_received_bytes_total", "Bytes of files that came from other agents."
        )
    )

    def sources(
        self, hub: ModelHub, repo: str, commit: str, monitor: FetchMonitor
    ) -> "SharedSources":
        """Return the sources of a commit's files. `monitor` gets the reason while nothing arrives."""
        return SharedSources(self, hub, repo, commit, monitor)

    def routes(self, offer: ModelOffer) -> list[Route]:
        """Return the URLs of a node by the links that both have, the best first; there is always one."""
        now = self.clock.monotonic()
        return routes(offer, self.fabric(), lambda url: self.failed_urls.get(url, now) > now)

    def note_failure(self, url: str) -> None:
        """Take note that a node does not answer at a URL: its cable may be gone."""
        self.failed_urls[url] = self.clock.monotonic() + _FAILED_URL_S

    async def piece_list(self, node: str, offer: ModelOffer) -> PieceList:
        """Return the hashes of pieces that a node vouches for; empty if it gives none."""
        found, asked = self.lists.get(offer.pieces), (node, offer.pieces)
        if found is not None:
            return found
        now = self.clock.monotonic()
        if self.unread_lists.get(asked, now) > now:
            return _NO_LIST
        try:
            found = await self.peers.read_list(node, self.routes(offer)[0].url, offer.pieces)
        except PeerError as error:
            # Another node may give the same list.
            log.info("no list of pieces", extra={"node": node, "why": str(error)})
            _keep(self.unread_lists, asked, self.clock.monotonic() + _FAILED_LIST_S)
            return _NO_LIST
        _keep(self.lists, offer.pieces, found)
        return found

    def is_banned(self, node: str) -> bool:
        """Return whether the node sent wrong bytes within the last hour."""
        return self.banned.get(node, float("-inf")) > self.clock.monotonic()

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus' text format."""
        yield from self.received.lines()


@dataclass(frozen=True, slots=True)
class SharedSources:
    """The sources of the files of one commit."""

    share: FleetShare
    hub: ModelHub
    repo: str
    commit: str
    monitor: FetchMonitor

    @property
    def folder(self) -> str:
        """Return the model's folder, by which agents name it."""
        return folder_name(self.repo, self.commit)

    def order(self, file: RemoteFile) -> str:
        """Return a key that differs from node to node."""
        return hashlib.sha256(f"{self.share.tracker.node} {file.digest}".encode()).hexdigest()

    @asynccontextmanager
    async def transfer(self, file: RemoteFile) -> AsyncIterator[BlobTransfer]:
        """Queue for the hub, and yield the transfer from any place that has the file."""
        tracker = self.share.tracker
        key = keys.fetch_claim_key(tracker.node, _name(file))
        tracker.say(key, FetchClaim(folder=self.folder))
        try:
            yield SharedTransfer(self, file)
        finally:
            tracker.withdraw(key)


def _name(file: RemoteFile) -> str:
    return f"{file.digest.algorithm}-{file.digest.hex}"


class SharedTransfer:
    """The transfer of one file from other agents, or from the hub when this node is the one to ask it."""

    def __init__(self, sources: SharedSources, file: RemoteFile) -> None:
        self._of = sources
        self._share = sources.share
        self._clock = sources.share.clock
        self._file = file
        self._name = _name(file)
        self._started = self._clock.monotonic()
        self._contributors: set[str] = set()
        self._asked_at: dict[str, float] = {}
        """The time from which a node may be asked again."""
        self._received: dict[str, int] = {}
        self._busy_until: dict[str, float] = {}
        self._lacking: set[str] = set()
        """Nodes that do not have the file. Those with other models are asked once: a file may belong to several."""
        self._is_waiting = False
        self._is_last_round = False
        """True in the round of questions that precedes the hub."""
        self._progress_at = self._started
        self.source = sources.hub.name

    @asynccontextmanager
    async def read(self, start: int) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open the file at byte `start`; the iterator yields its bytes to the end as they arrive."""
        async with aclosing(self._chunks(start)) as chunks:
            yield chunks

    async def _chunks(self, at: int) -> AsyncGenerator[bytes]:
        self._progress_at = self._clock.monotonic()
        while at < self._file.size:
            before = at
            async with aclosing(self._from_peers(at)) as pieces:
                async for chunk in pieces:
                    at += len(chunk)
                    self._show_wait(is_over=True)
                    yield chunk
            if at > before:
                self._is_last_round = False
                self._progress_at = self._clock.monotonic()
                continue
            if not self._may_ask_hub():
                self._is_last_round = False
                self._show_wait(is_over=False)
                await self._clock.sleep(_POLL_S)
                continue
            if (
                not self._is_last_round
            ):  # a node that had nothing a moment ago may have the file by now
                self._is_last_round = True
                self._asked_at.clear()
                continue
            self.source, self._is_last_round = self._of.hub.name, False
            self._show_wait(is_over=True)
            async with self._of.hub.read(
                self._of.repo, self._of.commit, self._file, start=at
            ) as chunks:
                async for chunk in chunks:
                    at += len(chunk)
                    yield chunk
            return

    def _show_wait(self, *, is_over: bool) -> None:
        """Let the progress say what is waited for, after some seconds without a byte."""
        is_silent = self._clock.monotonic() - self._progress_at >= self._share.silent_s
        if is_over and self._is_waiting:
            self._is_waiting, self._of.monitor.waiting = False, ""
        if not is_over and is_silent:
            queue = self._share.tracker.queue(self._name)
            first = queue[0] if queue else "the store"
            self._is_waiting = True
            self._of.monitor.waiting = f"waiting for {first}, the first in the queue for {self._file.path} at {self._of.hub.name}"

    def _may_ask_hub(self) -> bool:
        """Return whether this node is the first in the queue, or those before it bring nothing."""
        queue, now = self._share.tracker.queue(self._name), self._clock.monotonic()
        if self._share.tracker.node not in queue:  # the store has not answered
            return now - self._started >= _PLACE_S
        place = queue.index(self._share.tracker.node)
        is_busy = any(at > now for at in self._busy_until.values())
        return now - self._progress_at >= max(place, is_busy) * self._share.stall_s

    async def _from_peers(self, at: int) -> AsyncGenerator[bytes]:
        """Yield what the first node gives that has bytes from `at` on; nothing if none has."""
        # One request ends where a piece does; the few places of a node go round.
        count = min(PIECE_BYTES - at % PIECE_BYTES, self._file.size - at)
        for node, offer in self._candidates():
            got, url = 0, self._share.routes(offer)[0].url
            try:
                expected, owner = await self._piece_hash(node, offer, at)
                async with self._share.peers.read(
                    node, url, self._file.digest, at, count
                ) as answer:
                    status = answer.status
                    if status == 429:
                        self._busy_until[node] = self._clock.monotonic() + _BUSY_S
                    if status == 404:
                        self._lacking.add(node)
                    if status != 206:
                        self._pause(node, _PAUSES.get(status, _FAILED_S))
                    if answer.received > self._received.get(node, 0):  # it is slow, not dead
                        self._received[node] = answer.received
                        self._progress_at = self._clock.monotonic()
                    if answer.chunks is None:
                        continue
                    self.source = node
                    chunks = answer.chunks
                    if expected:
                        chunks = self._checked(chunks, count, expected, node)
                    async for chunk in chunks:
                        self._contributors.add(owner)
                        got += len(chunk)
                        self._share.received.add(count=len(chunk))
                        yield chunk
            except PeerError as error:
                log.info("a node gives no file", extra={"node": node, "why": str(error)})
                self._share.note_failure(url)
                self._pause(node, _FAILED_S if url == offer.url else 0.0)
            if got:
                return

    async def _piece_hash(self, node: str, offer: ModelOffer, at: int) -> tuple[str, str]:
        """Return the hash of the piece at a byte with the node that vouches for it: the one asked, else another.

        Without a hash, the node that is asked vouches for its bytes.
        """
        file = self._file
        if file.size > PIECE_BYTES and file.digest.algorithm == "sha256":
            offers = {name: models.get(self._of.folder) for name, models in self._offers().items()}
            for owner, its in ((node, offer), *offers.items()):
                if its is not None and its.pieces and not self._share.is_banned(owner):
                    listed = await self._share.piece_list(owner, its)
                    if found := listed.hash_at(file.digest.hex, at, file.size):
                        return found, owner
        return "", node

    async def _checked(
        self, chunks: AsyncIterator[bytes], count: int, expected: str, node: str
    ) -> AsyncIterator[bytes]:
        """Yield a piece when it is whole and right; ban the node that sent another. A part of one is not checked."""
        piece = bytearray()
        async for chunk in chunks:
            piece += chunk
        if len(piece) == count and await run_in_thread(_sha256, piece) != expected:
            await self._ban(node, "sent a wrong piece of it")
            return
        for start in range(0, len(piece), _CHUNK_BYTES):
            yield bytes(piece[start : start + _CHUNK_BYTES])

    def _offers(self) -> dict[str, dict[str, ModelOffer]]:
        return self._share.tracker.offers()

    def _candidates(self) -> list[tuple[str, ModelOffer]]:
        """Return the nodes to ask: by link, those with the whole model, the first ones of the queue, then each other once."""
        share, now = self._share, self._clock.monotonic()
        queue = {node: place for place, node in enumerate(share.tracker.queue(self._name))}
        near: list[tuple[tuple[int, bool, int, float], str, ModelOffer]] = []
        outside: list[tuple[str, ModelOffer]] = []
        for node, models in self._offers().items():
            if share.is_banned(node) or self._asked_at.get(node, now) > now:
                continue
            offer = models.get(self._of.folder)
            if offer is not None or node in queue:
                is_partial = offer is None or not offer.is_whole
                offer = offer or next(iter(models.values()))
                rank, place = share.routes(offer)[0].rank, queue.get(node, len(queue))
                near.append(((rank, is_partial, place, random.random()), node, offer))
            elif node not in self._lacking and self._file.size >= _WORTH_ASKING_BYTES:
                outside.append((node, next(iter(models.values()))))
        near.sort(key=lambda one: one[0])
        return [(node, offer) for _, node, offer in near[:_ASKED_AT_ONCE]] + outside

    def _pause(self, node: str, seconds: float) -> None:
        self._asked_at[node] = self._clock.monotonic() + seconds

    async def reject(self) -> bool:
        """Ban the nodes that vouched for bytes of the file, which has the wrong content; return whether there were any."""
        nodes, self._contributors = sorted(self._contributors), set()
        for node in nodes:
            await self._ban(
                node, "sent, or vouched for, bytes of it, and the whole has the wrong content"
            )
        return bool(nodes)

    async def _ban(self, node: str, why: str) -> None:
        """Ask a node no more for an hour, and record an event."""
        self._share.banned[node] = self._clock.monotonic() + BAN_S
        log.warning("a node sent wrong bytes", extra={"node": node, "file": self._name, "why": why})
        message = (
            f"{self._share.tracker.node} fetches {self._file.path} of {self._of.repo}; {node} {why}. It is not asked for "
            "an hour, and nothing wrong was kept: check its disk with `fleetctl models check --hash`"
        )
        try:
            await self._share.record(ObjectReference(kind="Node", name=node), "WrongBytes", message)
        except StoreError as error:
            log.info("event not written", extra={"why": str(error)})


def _keep(lists: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Keep a value beside the latest ones."""
    while len(lists) >= _KEPT_LISTS:
        del lists[next(iter(lists))]
    lists[key] = value


def _sha256(content: bytearray) -> str:
    return hashlib.sha256(content).hexdigest()
