"""Fetches from the stand-in hub into a store: whole, resumed, verified, limited, and once for each content."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
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
    ModelMissingError,
)
from models.hub.fetcher import FetchLimits, FetchRequest, ModelFetcher, ModelPart
from models.hub.file_selection import DEFAULT_PATTERNS
from models.hub.huggingface import HuggingFaceHub
from models.hub.progress import FetchMonitor
from models.model_files import PARTIAL_MARK
from models.model_store.integrity import check_model
from models.model_store.partial_file import open_locked
from models.model_store.store import ModelStore
from models.weight_headers import TensorShape, WeightHeaders
from tests.support.clock import SkippingClock
from tests.support.hub import COMMIT, REPO, HubFaults, StandInHub, tiny_files
from tests.support.waiting import until

FILES = tiny_files()
WANTED = {p: c for p, c in FILES.items() if not p.endswith((".py", ".md"))}
WANTED_BYTES = sum(map(len, WANTED.values()))
WEIGHTS = "model-00001-of-00002.safetensors"
PIECE = 1 << 16
REQUEST = FetchRequest(repo=REPO, commit=COMMIT)


@dataclass(kw_only=True)
class World:
    """A hub, its adapter, a store, and a fetcher whose pauses are short."""

    stand_in: StandInHub
    hub: HuggingFaceHub
    store: ModelStore
    fetcher: ModelFetcher

    def parts(self) -> list[str]:
        return sorted(path.name for path in self.store.incoming.iterdir())

    def assert_nothing_is_published(self) -> None:
        assert self.store.models() == ()
        assert not (self.store.root / "mlx-community--Tiny-4bit@1f2e3d4c5b6a").exists()


@asynccontextmanager
async def world(
    root: Path, faults: HubFaults | None = None, limits: FetchLimits | None = None
) -> AsyncIterator[World]:
    stand_in = StandInHub(repos={REPO: FILES}, faults=faults or HubFaults())
    clock = SkippingClock()
    store = ModelStore(root, clock)
    async with stand_in.serve(), open_hub_session() as session:
        yield World(
            stand_in=stand_in,
            hub=HuggingFaceHub(session, endpoint=stand_in.endpoint),
            store=store,
            fetcher=ModelFetcher(store, clock, limits=limits or FetchLimits(piece_bytes=PIECE)),
        )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def test_a_model_is_fetched_whole_and_then_found_without_a_request(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        monitor = FetchMonitor(SystemClock())
        model = await here.fetcher.fetch(here.hub, REQUEST, monitor=monitor)
        assert contents(model.folder) == WANTED
        assert all((model.folder / path).is_symlink() for path in WANTED)
        assert not any(Path(p.readlink()).is_absolute() for p in model.folder.glob("*.json"))
        progress = monitor.snapshot()
        assert (progress.phase, progress.percent, progress.files_present) == ("Present", 100, 5)
        assert progress.present_bytes == progress.fetched_bytes == WANTED_BYTES
        requests = len(here.stand_in.seen)
        assert await here.fetcher.fetch(here.hub, REQUEST) == model
        assert len(here.stand_in.seen) == requests
        assert here.parts() == []
        assert list(here.store.fetches.iterdir()) == []


async def test_further_patterns_fetch_only_what_is_missing(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        small = FetchRequest(repo=REPO, commit=COMMIT, patterns=("config.json",))
        first = await here.fetcher.fetch(here.hub, small)
        assert set(contents(first.folder)) == {"config.json"}
        more = await here.fetcher.fetch(here.hub, REQUEST)
        assert contents(more.folder) == WANTED
        assert here.stand_in.body_bytes == WANTED_BYTES
        assert set(more.patterns) == {"config.json", *DEFAULT_PATTERNS}


async def test_a_link_that_is_cut_again_and_again_costs_nothing_twice(tmp_path: Path) -> None:
    async with world(tmp_path, HubFaults(cut_after=70_000)) as here:
        monitor = FetchMonitor(SystemClock())
        model = await here.fetcher.fetch(here.hub, REQUEST, monitor=monitor)
        assert contents(model.folder) == WANTED
        assert monitor.fetched_bytes == WANTED_BYTES


async def test_a_hub_that_is_gone_ends_the_fetch_and_the_next_goes_on(tmp_path: Path) -> None:
    limits = FetchLimits(piece_bytes=PIECE, attempts=3)
    faults = HubFaults(cut_after=150_000, status_after_cut=500)
    async with world(tmp_path, faults, limits) as here:
        with pytest.raises(HubUnreachableError, match="answers 500"):
            await here.fetcher.fetch(here.hub, REQUEST)
        here.assert_nothing_is_published()
        here.stand_in.faults = HubFaults()
        model = await here.fetcher.fetch(here.hub, REQUEST)
        assert contents(model.folder) == WANTED
        assert (
            here.stand_in.body_bytes <= WANTED_BYTES + PIECE
        )  # what the socket had taken of the cut body


async def test_a_cancelled_fetch_keeps_what_it_has(tmp_path: Path) -> None:
    async with world(tmp_path, HubFaults(bytes_per_s=400_000)) as here:
        monitor = FetchMonitor(SystemClock())
        fetch = asyncio.gather(here.fetcher.fetch(here.hub, REQUEST, monitor=monitor))
        await until(lambda: monitor.fetched_bytes > 100_000)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        here.assert_nothing_is_published()
        kept = monitor.fetched_bytes
        here.stand_in.faults = HubFaults()
        again = FetchMonitor(SystemClock())
        model = await here.fetcher.fetch(here.hub, REQUEST, monitor=again)
        assert contents(model.folder) == WANTED
        assert again.fetched_bytes == WANTED_BYTES - kept


@pytest.mark.parametrize("at", [0, 3000, 299_999])
async def test_a_flipped_bit_publishes_nothing_and_keeps_nothing(tmp_path: Path, at: int) -> None:
    async with world(tmp_path, HubFaults(flip_bit_at=at)) as here:
        with pytest.raises(HashMismatchError, match="Nothing of it was kept"):
            await here.fetcher.fetch(here.hub, REQUEST)
        here.assert_nothing_is_published()
        here.stand_in.faults = HubFaults()
        assert contents((await here.fetcher.fetch(here.hub, REQUEST)).folder) == WANTED


async def test_bytes_that_rot_in_a_partial_file_are_fetched_again(tmp_path: Path) -> None:
    async with world(tmp_path, HubFaults(bytes_per_s=600_000)) as here:
        monitor = FetchMonitor(SystemClock())
        fetch = asyncio.gather(here.fetcher.fetch(here.hub, REQUEST, monitor=monitor))
        await until(lambda: monitor.fetched_bytes > 250_000)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        largest = max(here.store.incoming.glob("*.part"), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(PIECE + 5)
            file.write(b"rot")
        here.stand_in.faults = HubFaults()
        assert contents((await here.fetcher.fetch(here.hub, REQUEST)).folder) == WANTED


async def test_two_fetches_of_one_model_fetch_it_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        monitors = [FetchMonitor(SystemClock()) for _ in range(3)]
        others = ModelFetcher(ModelStore(tmp_path, SkippingClock()), SkippingClock())
        models = await asyncio.gather(
            *(
                fetcher.fetch(here.hub, REQUEST, monitor=monitor)
                for fetcher, monitor in zip(
                    (here.fetcher, here.fetcher, others), monitors, strict=True
                )
            )
        )
        assert len({model.folder for model in models}) == 1
        assert here.stand_in.body_bytes == WANTED_BYTES
        assert {fetch_monitor.snapshot().percent for fetch_monitor in monitors} == {100}


async def test_two_models_with_the_same_file_fetch_it_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.stand_in.repos["mlx-community/Twin"] = {**FILES, "config.json": b'{"other": 1}'}
        twin = FetchRequest(repo="mlx-community/Twin", commit=COMMIT)
        monitors = [FetchMonitor(SystemClock()) for _ in range(2)]
        await asyncio.gather(
            here.fetcher.fetch(here.hub, REQUEST, monitor=monitors[0]),
            here.fetcher.fetch(here.hub, twin, monitor=monitors[1]),
        )
        assert here.stand_in.body_bytes == WANTED_BYTES + len(b'{"other": 1}')
        assert {monitor.snapshot().percent for monitor in monitors} == {100}
        assert len(here.store.models()) == 2


async def test_a_rate_limit_is_waited_for_as_told(tmp_path: Path) -> None:
    faults = HubFaults(status=429, retry_after="30", failures=2)
    async with world(tmp_path, faults) as here:
        clock = SkippingClock()
        model = await ModelFetcher(here.store, clock).fetch(here.hub, REQUEST)
        assert contents(model.folder) == WANTED
        assert all(30 < wait <= 31 for wait in clock.sleeps)
        assert len(clock.sleeps) == 2


async def test_waits_for_rate_limits_have_a_budget(tmp_path: Path) -> None:
    limits = FetchLimits(rate_limit_wait_s=50)
    async with world(tmp_path, HubFaults(status=429, retry_after="30"), limits) as here:
        with pytest.raises(HubRateLimitedError):
            await here.fetcher.fetch(here.hub, REQUEST)
        assert len(here.stand_in.seen) == 2


async def test_a_missing_model_is_not_retried(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        with pytest.raises(ModelMissingError):
            await here.fetcher.fetch(here.hub, FetchRequest(repo="a/b", commit=COMMIT))
        assert len(here.stand_in.seen) == 1


async def test_an_unsafe_list_fetches_nothing(tmp_path: Path) -> None:
    bad: Sequence[dict[str, object]] = [
        {"type": "file", "path": path, "size": 3, "oid": "0" * 40}
        for path in ("config.json", "../../escape.json")
    ]
    async with world(tmp_path / "store", HubFaults(listing=list(bad))) as here:
        with pytest.raises(ListingRefusedError):
            await here.fetcher.fetch(here.hub, REQUEST)
        assert here.stand_in.body_bytes == 0
        assert not (tmp_path / "escape.json").exists()


async def test_a_disk_without_room_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.store.reserve_bytes = 1 << 60
        asked: list[int] = []

        async def make_room(wanted_bytes: int) -> int:
            asked.append(wanted_bytes)
            return 3 << 30

        fetcher = ModelFetcher(here.store, SkippingClock(), make_room=make_room)
        with pytest.raises(
            InsufficientDiskError, match=r"too little\. Unused models have 3\.0 GiB"
        ):
            await fetcher.fetch(here.hub, REQUEST)
        assert here.stand_in.body_bytes == 0
        assert list(here.store.fetches.iterdir()) == []
        assert len(asked) == 1


async def test_a_fetch_goes_on_when_unused_models_made_room(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.store.reserve_bytes = 1 << 60

        async def make_room(wanted_bytes: int) -> int:
            assert wanted_bytes > 0
            here.store.reserve_bytes = 0  # the room is there now
            return 0

        model = await ModelFetcher(here.store, SkippingClock(), make_room=make_room).fetch(
            here.hub, REQUEST
        )
    assert model.folder.is_dir()


async def test_the_bandwidth_limit_holds_for_all_files_together(tmp_path: Path) -> None:
    limits = FetchLimits(bytes_per_s=100_000)
    async with world(tmp_path, None, limits) as here:
        clock = SkippingClock()
        fetcher = ModelFetcher(here.store, clock, limits=limits)
        started = clock.monotonic()
        await fetcher.fetch(here.hub, REQUEST)
        # One second's worth is the burst.
        assert clock.monotonic() - started >= (WANTED_BYTES - 100_000) / 100_000 - 0.1


async def test_a_folder_of_a_person_is_never_replaced(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        own = tmp_path / "mlx-community--Tiny-4bit@1f2e3d4c5b6a"
        own.mkdir()
        (own / "config.json").write_text("mine")
        with pytest.raises(FileExistsError, match="was not made by the store"):
            await here.fetcher.fetch(here.hub, REQUEST)
        assert (own / "config.json").read_text() == "mine"
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
        only = FetchRequest(repo=REPO, commit=COMMIT, patterns=(WEIGHTS,))
        monitor = FetchMonitor(clock)
        fetch = asyncio.gather(fetcher.fetch(hub, only, monitor=monitor))
        waiting = await until(lambda: monitor.waiting, every_s=0.001)
        assert (
            "sends model-00001-of-00002.safetensors of mlx-community/Tiny-4bit too slowly"
            in waiting
        )
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch


async def test_a_rate_of_nothing_is_refused() -> None:
    limit = BandwidthLimit(SkippingClock(), bytes_per_s=10)
    with pytest.raises(ValueError, match="no rate"):
        limit.set_rate(0)
    limit.set_rate(None)
    await limit.take(1 << 40)


async def test_a_cancellation_at_any_moment_leaves_no_lock_behind(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for number in range(60):
            fetch = asyncio.gather(here.fetcher.fetch(here.hub, REQUEST))
            for _ in range(5 * number):
                await asyncio.sleep(0)
            fetch.cancel()
            with suppress(asyncio.CancelledError):
                await fetch
            here.store.prepare()
            for path in (*here.store.incoming.glob("*.part"), *here.store.fetches.glob("*.json")):
                descriptor = open_locked(path)
                assert descriptor is not None, f"{path.name} stays locked after {5 * number} turns"
                os.close(descriptor)
        assert contents((await here.fetcher.fetch(here.hub, REQUEST)).folder) == WANTED


def part_of(*files: str) -> ModelPart:
    """Return a part with these weight files of the repository."""
    every = [path for path in WANTED if path.endswith(".safetensors")]
    shape = TensorShape(dtype="F32", shape=(1,), size=4)
    headers = WeightHeaders(config="{}", files={path: {path: shape} for path in every})
    return ModelPart(files=frozenset(files), headers=headers)


async def test_a_part_of_a_model_is_fetched_and_marked_and_the_rest_comes_later(
    tmp_path: Path,
) -> None:
    other = "model-00002-of-00002.safetensors"
    async with world(tmp_path) as found:
        monitor = FetchMonitor(found.fetcher.clock)
        request = replace(REQUEST, part=part_of(WEIGHTS))
        model = await found.fetcher.fetch(found.hub, request, monitor=monitor)
        assert found.stand_in.requests("GET", other) == []
        assert monitor.total_bytes == WANTED_BYTES - len(FILES[other])
        assert (model.is_partial, model.absent) == (True, {other: len(FILES[other])})
        assert model.absent_bytes == len(FILES[other])
        assert sorted(contents(model.folder)) == sorted({*WANTED, PARTIAL_MARK} - {other})
        assert check_model(found.store, model.name, hashes=True) == ()
        assert request.is_met_by(model)
        # The other rank's part, and what needs all of it.
        assert not replace(REQUEST, part=part_of(other)).is_met_by(model)
        assert not REQUEST.is_met_by(model)
        asked = len(found.stand_in.seen)
        again = await found.fetcher.fetch(found.hub, request)
        assert (again.files, again.absent) == (model.files, model.absent)
        assert len(found.stand_in.seen) == asked, "what is here is not asked for"
        before = found.stand_in.body_bytes
        whole = await found.fetcher.fetch(found.hub, REQUEST)
        assert found.stand_in.body_bytes - before == len(FILES[other])
        assert not whole.is_partial
        assert contents(whole.folder) == WANTED
        assert request.is_met_by(whole)


async def test_two_parts_of_a_model_are_the_whole(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        other = "model-00002-of-00002.safetensors"
        await found.fetcher.fetch(found.hub, replace(REQUEST, part=part_of(WEIGHTS)))
        model = await found.fetcher.fetch(found.hub, replace(REQUEST, part=part_of(other)))
        assert not model.is_partial
        assert REQUEST.is_met_by(model)
        assert contents(model.folder) == WANTED


async def test_a_partial_model_without_its_mark_is_fetched_again(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        request = replace(REQUEST, part=part_of(WEIGHTS))
        model = await found.fetcher.fetch(found.hub, request)
        (model.folder / PARTIAL_MARK).unlink()
        (defect,) = check_model(found.store, model.name)
        assert (defect.path, defect.defect) == (PARTIAL_MARK, "Missing")
        assert found.store.find(REPO, COMMIT) is None
        again = await found.fetcher.fetch(found.hub, request)
        assert again.is_partial
        assert check_model(found.store, model.name) == ()
