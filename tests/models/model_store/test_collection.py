"""Collection: a thousand random stores in the plan, random histories on the disk, and a file that is mapped meanwhile."""

import mmap
import os
import random
from pathlib import Path

import pytest

from models.hub.digests import BlobDigest
from models.model_store.admission import reserve
from models.model_store.collection import (
    CollectionPolicy,
    ModelUsage,
    StoreUsage,
    collect,
    collectable_bytes,
    plan_collection,
    plan_removal,
)
from models.model_store.store import ModelStore
from tests.support.hub import COMMIT
from tests.support.model_store import ShiftedClock, add_model, files_below, stored_contents
from tests.support.values import present

NOW = 1_000_000.0
HOUR = 3600.0
POLICY = CollectionPolicy()


def usage(
    *models: ModelUsage, sizes: dict[str, int], used: int, disk: int = 1000, **more: object
) -> StoreUsage:
    return StoreUsage(
        models=models,
        sizes=sizes,
        held=frozenset(),
        leftovers={},
        disk_bytes=disk,
        free_bytes=disk - used,
        now=NOW,
    )


def model(name: str, contents: str, age_h: float, *, is_kept: bool = False) -> ModelUsage:
    return ModelUsage(
        name=name, contents=frozenset(contents), used_at=NOW - age_h * HOUR, is_kept=is_kept
    )


def test_the_least_recently_used_go_first_until_the_end_is_reached() -> None:
    store_usage = usage(
        model("new", "a", 5), model("old", "b", 50), model("older", "c", 90),
        sizes={"a": 100, "b": 60, "c": 60}, used=860,
    )  # fmt: skip
    plan = plan_collection(store_usage, POLICY)
    assert (plan.models, plan.freed_bytes, plan.shortfall_bytes) == (("older", "old"), 120, 0)


def test_a_model_whose_contents_others_keep_is_not_removed_for_nothing() -> None:
    store_usage = usage(
        model("twin", "a", 90), model("kept", "a", 1, is_kept=True), model("old", "b", 50),
        sizes={"a": 800, "b": 150}, used=999,
    )  # fmt: skip
    assert plan_collection(store_usage, POLICY).models == ("old",)


def random_usage(chance: random.Random) -> StoreUsage:
    contents = [f"c{number}" for number in range(chance.randint(1, 12))]
    sizes = {content: chance.randint(0, 100) for content in contents}
    models = tuple(
        ModelUsage(
            name=f"m{number}",
            contents=frozenset(chance.sample(contents, chance.randint(0, len(contents)))),
            used_at=NOW - chance.choice([-1, 0, 0.5, 1, 2, 30]) * HOUR,
            is_kept=chance.random() < 0.4,
        )
        for number in range(chance.randint(0, 8))
    )
    disk = sum(sizes.values()) + chance.randint(1, 300)
    return StoreUsage(
        models=models,
        sizes=sizes,
        held=frozenset(c for c in contents if chance.random() < 0.2),
        leftovers={"x.part": chance.randint(0, 50)} if chance.random() < 0.3 else {},
        disk_bytes=disk,
        free_bytes=disk - chance.randint(sum(sizes.values()), disk),
        now=NOW,
    )


def test_a_thousand_random_plans_keep_what_they_must() -> None:
    chance = random.Random(17)
    collected = 0
    for _ in range(1000):
        store_usage = random_usage(chance)
        plan = plan_collection(store_usage, POLICY)
        by_name = {model_usage.name: model_usage for model_usage in store_usage.models}
        gone = {by_name[name] for name in plan.models}
        assert not any(
            model_usage.is_kept or NOW - model_usage.used_at < HOUR for model_usage in gone
        )
        usages = [model_usage for model_usage in store_usage.models if model_usage not in gone]
        assert plan.contents.isdisjoint(
            content for model_usage in usages for content in model_usage.contents
        )
        assert plan.contents.isdisjoint(store_usage.held)
        freed = sum(store_usage.sizes[c] for c in plan.contents) + sum(
            store_usage.leftovers[name] for name in plan.leftovers
        )
        assert plan.freed_bytes == freed
        used = store_usage.disk_bytes - store_usage.free_bytes
        if used * 100 < 85 * store_usage.disk_bytes:
            assert plan.is_empty
        elif plan.shortfall_bytes == 0:
            assert (used - freed) * 100 <= 75 * store_usage.disk_bytes + 100
        else:  # nothing more could go
            rest = plan_removal(store_usage, 1 << 60, protected_s=HOUR)
            assert rest.freed_bytes == plan.freed_bytes
        collected += bool(plan.models)
    assert collected > 80


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 1000), marks=pytest.mark.full)]
)
def test_random_histories_on_a_disk_never_lose_a_kept_model(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        clock = ShiftedClock()
        store = ModelStore(tmp_path / str(seed), clock)
        expected: dict[str, dict[str, bytes]] = {}
        in_use: set[str] = set()
        for step in range(12):
            clock.shift_s += chance.choice([60, 4000, 9000])
            names = sorted(expected)
            match chance.choice(["add", "add", "pin", "use", "unuse", "load", "collect"]):
                case "add":
                    files = {f"{n}.json": b"%d" % chance.randint(0, 9) * 50 for n in range(3)}
                    name = add_model(store, f"a/m{step}", COMMIT, files).name
                    expected[name] = files
                case "pin" if names:
                    store.pin(chance.choice(names))
                case "use" if names:
                    in_use.add(chance.choice(names))
                case "unuse" if in_use:
                    in_use.remove(chance.choice(sorted(in_use)))
                case "load" if names:
                    store.record_load(chance.choice(names))
                case "collect":
                    before = {stored_model.name: stored_model for stored_model in store.models()}
                    plan = collect(store, in_use, wanted_bytes=chance.choice([0, 60, 1 << 30]))
                    now = clock.now().timestamp()
                    for name in plan.models:
                        assert name not in in_use
                        assert not before[name].is_pinned
                        assert now - before[name].used_at.timestamp() >= HOUR
                        del expected[name]
                case _:
                    continue
            found = {
                stored_model.name: files_below(stored_model.folder)
                for stored_model in store.models()
            }
            assert found == expected


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def store(tmp_path: Path, clock: ShiftedClock) -> ModelStore:
    return ModelStore(tmp_path, clock)


def test_a_file_that_is_mapped_stays_readable_while_its_model_is_collected(
    store: ModelStore, clock: ShiftedClock
) -> None:
    content = os.urandom(100_000)
    stored_model = add_model(store, "a/b", COMMIT, {"model.safetensors": content})
    with (stored_model.folder / "model.safetensors").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    clock.shift_s = 2 * HOUR
    assert collect(store, set(), wanted_bytes=1).models == (stored_model.name,)
    assert not stored_model.folder.exists()
    assert mapped[:] == content
    mapped.close()


def test_a_dry_run_removes_nothing(store: ModelStore, clock: ShiftedClock) -> None:
    stored_model = add_model(store, "a/b", COMMIT, {"a.json": b"12345"})
    clock.shift_s = 2 * HOUR
    assert collectable_bytes(store, {stored_model.name}) == 0
    assert collectable_bytes(store, set()) == 5
    plan = collect(store, set(), wanted_bytes=1, is_dry_run=True)
    assert plan.models == (stored_model.name,)
    assert store.models() == (stored_model,)


def test_a_load_protects_for_an_hour(store: ModelStore, clock: ShiftedClock) -> None:
    stored_model = add_model(store, "a/b", COMMIT, {"a.json": b"12345"})
    clock.shift_s = 2 * HOUR
    assert store.record_load(stored_model.name)
    clock.shift_s += HOUR - 10
    assert collect(store, set(), wanted_bytes=1).is_empty
    clock.shift_s += 20
    assert collect(store, set(), wanted_bytes=1).models == (stored_model.name,)


def test_contents_of_running_fetches_and_young_ones_stay_and_leftovers_go(
    store: ModelStore, clock: ShiftedClock
) -> None:
    stored_model = add_model(store, "a/b", COMMIT, {"a.json": b"12345", "b.json": b"67"})
    held = BlobDigest("sha256", next(f.sha256 for f in stored_model.files if f.path == "a.json"))
    coming = BlobDigest("sha256", "1" * 64)
    (store.root / stored_model.name).rename(store.root / "away")  # contents without a model
    (store.blobs / "manifests" / f"{stored_model.name}.json").unlink()
    for digest in (coming, BlobDigest("sha256", "2" * 64)):
        store.part_path(digest).write_bytes(b"part")
    assert collect(store, set(), wanted_bytes=1).is_empty
    clock.shift_s = 48 * HOUR
    with reserve(store, "a--c@1f2e3d4c5b6a", {held: 5, coming: 9}) or pytest.fail("not reserved"):
        plan = collect(store, set(), wanted_bytes=1)
    assert len(plan.contents) == 1
    assert plan.leftovers == (f"sha256-{'2' * 64}.part",)
    assert list(stored_contents(store)) == [held.hex]
    assert store.part_path(coming).exists()


def test_names_of_contents_that_are_gone_and_old_records_are_swept(
    store: ModelStore, clock: ShiftedClock
) -> None:
    store.prepare()
    (store.blobs / "git-sha1" / ("3" * 40)).symlink_to(f"../sha256/{'4' * 64}")
    held = present(reserve(store, "a--c@1f2e3d4c5b6a", {BlobDigest("sha256", "1" * 64): 9}))
    held.release(keeps_record=True)  # as after a failure
    collect(store, set(), wanted_bytes=1)
    assert len(list((store.blobs / "git-sha1").iterdir())) == 1
    assert len(list(store.fetches.iterdir())) == 1
    clock.shift_s = 25 * HOUR
    collect(store, set(), wanted_bytes=1)
    assert list((store.blobs / "git-sha1").iterdir()) == []
    assert list(store.fetches.iterdir()) == []
