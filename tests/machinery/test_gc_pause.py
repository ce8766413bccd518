"""The garbage collector is disabled in a block, and restored afterwards."""

import gc

import pytest

from machinery.gc_pause import collect_rarely, freeze_survivors, pause_collection


def test_the_collector_is_enabled_again_after_an_error() -> None:
    assert gc.isenabled()
    with pause_collection():
        assert not gc.isenabled()
        with pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), pause_collection():
        raise KeyError
    assert gc.isenabled()


def test_what_is_settled_is_not_looked_at() -> None:
    before = gc.get_freeze_count()
    try:
        freeze_survivors()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_many_objects_are_created_before_the_collector_runs() -> None:
    before, runs = gc.get_threshold(), list[str]()
    gc.collect()
    gc.callbacks.append(lambda phase, _: runs.append(phase))
    try:
        collect_rarely()
        kept: list[list[int]] = [[] for _ in range(10_000)]
        assert not runs
        kept += [[] for _ in range(20_000)]
        assert runs
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)
