"""Fetches from the stand-in hub into a store: whole, resumed, verified, limited, and once for each content."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typing_extensions import override

from machinery.clock import SystemClock
from models.hub.bandwidth import BandwidthLimit
from models.hub.connection import open_hub_session
from models.hub.errors import (
    HashMismatchError,
    HubRateLimitedError,
    HubUnreachableError,
    InsufficientDiskError,
    ListingRefusedError,
)
from models.hub.fetcher import FetchLimits, FetchRequest, ModelFetcher, ModelPart
from models.hub.file_selection import DEFAULT_PATTERNS
from models.hub.huggingface import HuggingFaceHub
from models.hub.progress import FetchMonitor
from models.model_files import PARTIAL_MARK
from models.model_store.integrity import check_model
from models.model_store.partial_file import open_locked
from models.model_store.store import ModelStore, StoredModel
from models.weight_headers import TensorShape, WeightHeaders
from tests.support.clock import SkippingClock
from tests.support.hub import COMMIT, REPO, HubFaults, StandInHub, tiny_files
from tests.support.model_store import files_below
from tests.support.waiting import until

FILES = tiny_files()
WANTED = {p: c for p, c in FILES.items() if not p.endswith((".py", ".md"))}
WANTED_BYTES = sum(map(len, WANTED.values()))
WEIGHTS = "model-00001-of-00002.safetensors"
PIECE = 1 << 16
REQUEST = FetchRequest(repo=REPO, commit=COMMIT)


OTHER = "model-00002-of-00002.safetensors"
NAME = "mlx-community--Tiny-4bit@1f2e3d4c5b6a"


@dataclass(kw_only=True)
class World:
    """A hub, its adapter, a store, and a fetcher whose pauses are short."""

    stand_in: StandInHub
    hub: HuggingFaceHub
    store: ModelStore
    fetcher: ModelFetcher

    async def fetch(
        self, request: FetchRequest = REQUEST, monitor: FetchMonitor | None = None
    ) -> StoredModel:
        return await self.fetcher.fetch(self.hub, request, monitor=monitor)

    async def cancelled_after(self, count: int) -> FetchMonitor:
        """Begin a fetch, cancel it after so many bytes, and mend the hub."""
        monitor = FetchMonitor(SystemClock())
        fetch = asyncio.gather(self.fetch(monitor=monitor))
        await until(lambda: monitor.fetched_bytes > count)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        self.assert_nothing_is_published()
        self.stand_in.faults = HubFaults()
        return monitor

    def assert_nothing_is_published(self) -> None:
        assert self.store.models() == ()
        assert not (self.store.root / NAME).exists()

    async def assert_fetched(self, monitor: FetchMonitor | None = None) -> StoredModel:
        model = await self.fetch(monitor=monitor)
        assert files_below(model.folder) == WANTED
        return model


@asynccontextmanager
async def world(
    root: Path, faults: HubFaults | None = None, limits: FetchLimits | None = None
) -> AsyncIterator[World]:
    stand_in = StandInHub(repos={REPO: FILES}, faults=faults or HubFaults())
    clock = SkippingClock()
    store = ModelStore(root, clock)
    fetcher = ModelFetcher(store, clock, limits=limits or FetchLimits(piece_bytes=PIECE))
    async with stand_in.serve(), open_hub_session() as session:
        hub = HuggingFaceHub(session, endpoint=stand_in.endpoint)
        yield World(stand_in=stand_in, hub=hub, store=store, fetcher=fetcher)


async def test_a_model_is_fetched_whole_and_then_found_without_a_request(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        monitor = FetchMonitor(SystemClock())
        model = await here.assert_fetched(monitor)
        assert all((model.folder / path).is_symlink() for path in WANTED)
        assert not any(Path(p.readlink()).is_absolute() for p in model.folder.glob("*.json"))
        progress = monitor.snapshot()
        assert (progress.phase, progress.percent, progress.files_present) == ("Present", 100, 5)
        assert progress.present_bytes == progress.fetched_bytes == WANTED_BYTES
        requests = len(here.stand_in.seen)
        assert await here.fetch() == model
        assert len(here.stand_in.seen) == requests
        assert [*here.store.incoming.iterdir(), *here.store.fetches.iterdir()] == []


async def test_further_patterns_fetch_only_what_is_missing(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        small = FetchRequest(repo=REPO, commit=COMMIT, patterns=("config.json",))
        assert set(files_below((await here.fetch(small)).folder)) == {"config.json"}
        model = await here.assert_fetched()
        assert here.stand_in.body_bytes == WANTED_BYTES
        assert set(model.patterns) == {"config.json", *DEFAULT_PATTERNS}


async def test_a_link_that_is_cut_again_and_again_costs_nothing_twice(tmp_path: Path) -> None:
    async with world(tmp_path, HubFaults(cut_after=70_000)) as here:
        monitor = FetchMonitor(SystemClock())
        await here.assert_fetched(monitor)
        assert monitor.fetched_bytes == WANTED_BYTES


async def test_a_hub_that_is_gone_ends_the_fetch_and_the_next_goes_on(tmp_path: Path) -> None:
    limits = FetchLimits(piece_bytes=PIECE, attempts=3)
    faults = HubFaults(cut_after=150_000, status_after_cut=500)
    async with world(tmp_path, faults, limits) as here:
        with pytest.raises(HubUnreachableError, match="answers 500"):
            await here.fetch()
        here.assert_nothing_is_published()
        here.stand_in.faults = HubFaults()
        await here.assert_fetched()
        # What the socket had taken of the cut body comes again.
        assert here.stand_in.body_bytes <= WANTED_BYTES + PIECE


async def test_a_cancelled_fetch_keeps_what_it_has(tmp_path: Path) -> None:
    async with world(tmp_path, HubFaults(bytes_per_s=400_000)) as here:
        first, second = await here.cancelled_after(100_000), FetchMonitor(SystemClock())
        await here.assert_fetched(second)
        assert second.fetched_bytes == WANTED_BYTES - first.fetched_bytes


@pytest.mark.parametrize("at", [0, 3000, 299_999])
async def test_a_flipped_bit_publishes_nothing_and_keeps_nothing(tmp_path: Path, at: int) -> None:
    async with world(tmp_path, HubFaults(flip_bit_at=at)) as here:
        with pytest.raises(HashMismatchError, match="Nothing of it was kept"):
            await here.fetch()
        here.assert_nothing_is_published()
        here.stand_in.faults = HubFaults()
        await here.assert_fetched()


async def test_bytes_that_rot_in_a_partial_file_are_fetched_again(tmp_path: Path) -> None:
    async with world(tmp_path, HubFaults(bytes_per_s=600_000)) as here:
        await here.cancelled_after(250_000)
        largest = max(here.store.incoming.glob("*.part"), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(PIECE + 5)
            file.write(b"rot")
        await here.assert_fetched()


async def test_fetches_of_the_same_files_at_once_fetch_them_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.stand_in.repos["mlx-community/Twin"] = {**FILES, "config.json": b'{"other": 1}'}
        twin = FetchRequest(repo="mlx-community/Twin", commit=COMMIT)
        others = ModelFetcher(ModelStore(tmp_path, SkippingClock()), SkippingClock())
        monitors = [FetchMonitor(SystemClock()) for _ in range(4)]
        models = await asyncio.gather(
            here.fetch(monitor=monitors[0]),
            here.fetch(monitor=monitors[1]),
            others.fetch(here.hub, REQUEST, monitor=monitors[2]),
            here.fetch(twin, monitors[3]),
        )
        assert len({model.folder for model in models}) == len(here.store.models()) == 2
        assert here.stand_in.body_bytes == WANTED_BYTES + len(b'{"other": 1}')
        assert {monitor.snapshot().percent for monitor in monitors} == {100}


async def test_a_rate_limit_is_waited_for_as_told(tmp_path: Path) -> None:
    async with world(tmp_path, HubFaults(status=429, retry_after="30", failures=2)) as here:
        clock = here.fetcher.clock
        assert isinstance(clock, SkippingClock)
        await here.assert_fetched()
        assert all(30 < wait <= 31 for wait in clock.sleeps)
        assert len(clock.sleeps) == 2


async def test_waits_for_rate_limits_have_a_budget(tmp_path: Path) -> None:
    limits = FetchLimits(rate_limit_wait_s=50)
    async with world(tmp_path, HubFaults(status=429, retry_after="30"), limits) as here:
        with pytest.raises(HubRateLimitedError):
            await here.fetch()
        assert len(here.stand_in.seen) == 2


async def test_an_unsafe_list_fetches_nothing(tmp_path: Path) -> None:
    listing: list[dict[str, object]] = [
        {"type": "file", "path": path, "size": 3, "oid": "0" * 40}
        for path in ("config.json", "../../escape.json")
    ]
    async with world(tmp_path / "store", HubFaults(listing=listing)) as here:
        with pytest.raises(ListingRefusedError):
            await here.fetch()
        assert here.stand_in.body_bytes == 0
        assert not (tmp_path / "escape.json").exists()


async def test_a_disk_without_room_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.store.reserve_bytes = 1 << 60
        missing: list[int] = []

        async def make_room(wanted_bytes: int) -> int:
            missing.append(wanted_bytes)
            if len(missing) == 2:
                here.store.reserve_bytes = 0  # the room is there now
            return 3 << 30

        fetcher = ModelFetcher(here.store, SkippingClock(), make_room=make_room)
        with pytest.raises(
            InsufficientDiskError, match=r"too little\. Unused models have 3\.0 GiB"
        ):
            await fetcher.fetch(here.hub, REQUEST)
        assert (here.stand_in.body_bytes, len(missing)) == (0, 1)
        assert list(here.store.fetches.iterdir()) == []
        assert (await fetcher.fetch(here.hub, REQUEST)).folder.is_dir()


async def test_the_bandwidth_limit_holds_for_all_files_together(tmp_path: Path) -> None:
    async with world(tmp_path, None, FetchLimits(bytes_per_s=100_000)) as here:
        started = here.fetcher.clock.monotonic()
        await here.fetch()
        # One second's worth is the burst.
        took_s = here.fetcher.clock.monotonic() - started
        assert took_s >= (WANTED_BYTES - 100_000) / 100_000 - 0.1
    limit = BandwidthLimit(SkippingClock(), bytes_per_s=10)
    with pytest.raises(ValueError, match="no rate"):
        limit.set_rate(0)
    limit.set_rate(None)
    await limit.take(1 << 40)


async def test_a_folder_of_a_person_is_never_replaced(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        (tmp_path / NAME).mkdir()
        (tmp_path / NAME / "config.json").write_text("mine")
        with pytest.raises(FileExistsError, match="was not made by the store"):
            await here.fetch()
        assert (tmp_path / NAME / "config.json").read_text() == "mine"
        assert here.stand_in.seen == []


async def test_a_stream_that_drips_is_cut(tmp_path: Path) -> None:
    """Bytes that arrive do not make a stream alive: a hub that drips for ever holds the fetch for minutes only."""
    clock = SkippingClock()

    class DrippingHub(HuggingFaceHub):
        @override
        @asynccontextmanager
        async def read(self, *_: object, **__: object) -> AsyncIterator[AsyncIterator[bytes]]:
            async def chunks() -> AsyncIterator[bytes]:
                for _ in range(1000):
                    await clock.sleep(50.0)
                    yield b"x"

            yield chunks()

    async with world(tmp_path) as here, open_hub_session() as session:
        hub = DrippingHub(session, endpoint=here.stand_in.endpoint)
        fetcher = ModelFetcher(here.store, clock, limits=FetchLimits(parallel_files=1))
        weights = FetchRequest(repo=REPO, commit=COMMIT, patterns=(WEIGHTS,))
        monitor = FetchMonitor(clock)
        fetch = asyncio.gather(fetcher.fetch(hub, weights, monitor=monitor))
        waiting = await until(lambda: monitor.waiting, every_s=0.001)
        assert f"sends {WEIGHTS} of mlx-community/Tiny-4bit too slowly" in waiting
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch


async def test_a_cancellation_at_any_moment_leaves_no_lock_behind(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for turns in range(0, 300, 5):
            fetch = asyncio.gather(here.fetch())
            for _ in range(turns):
                await asyncio.sleep(0)
            fetch.cancel()
            with suppress(asyncio.CancelledError):
                await fetch
            here.store.prepare()
            for path in (*here.store.incoming.glob("*.part"), *here.store.fetches.glob("*.json")):
                descriptor = open_locked(path)
                assert descriptor is not None, f"{path.name} stays locked after {turns} turns"
                os.close(descriptor)
        await here.assert_fetched()


def part_of(*files: str) -> FetchRequest:
    """Return the request of a part with these weight files of the repository."""
    shape = TensorShape(dtype="F32", shape=(1,), size=4)
    headers = WeightHeaders(config="{}", files={path: {path: shape} for path in (WEIGHTS, OTHER)})
    return replace(REQUEST, part=ModelPart(files=frozenset(files), headers=headers))


async def test_a_part_of_a_model_is_fetched_and_marked_and_the_rest_comes_later(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        monitor, request = FetchMonitor(here.fetcher.clock), part_of(WEIGHTS)
        model = await here.fetch(request, monitor)
        other_bytes = len(FILES[OTHER])
        assert here.stand_in.requests("GET", OTHER) == []
        assert monitor.total_bytes == WANTED_BYTES - other_bytes
        assert (model.is_partial, model.absent) == (True, {OTHER: other_bytes})
        assert model.absent_bytes == other_bytes
        assert sorted(files_below(model.folder)) == sorted({*WANTED, PARTIAL_MARK} - {OTHER})
        assert check_model(here.store, model.name, hashes=True) == ()
        # The other rank's part, and what needs all of it.
        requests = (request, part_of(OTHER), REQUEST)
        assert [r.is_met_by(model) for r in requests] == [True, False, False]
        asked = len(here.stand_in.seen)
        again = await here.fetch(request)
        assert (again.files, again.absent) == (model.files, model.absent)
        assert len(here.stand_in.seen) == asked, "what is here is not asked for"
        before = here.stand_in.body_bytes
        whole = await here.assert_fetched()
        assert here.stand_in.body_bytes - before == other_bytes
        assert not whole.is_partial
        assert request.is_met_by(whole)


async def test_a_partial_model_without_its_mark_is_fetched_again(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        model = await here.fetch(part_of(WEIGHTS))
        (model.folder / PARTIAL_MARK).unlink()
        (defect,) = check_model(here.store, model.name)
        assert (defect.path, defect.defect) == (PARTIAL_MARK, "Missing")
        assert here.store.find(REPO, COMMIT) is None
        assert (await here.fetch(part_of(WEIGHTS))).is_partial
        assert check_model(here.store, model.name) == ()
