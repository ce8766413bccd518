"""The prefix cache on real models: continuing from it equals reading everything, and evicted memory is free."""

import functools
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.cache.block_tree import NODE_BYTES, block_hash, encode_tokens
from tests.support.engine_cache_models import CONFIGS, KINDS, RECURRENT, WINDOW, Tiny
from tests.support.mlx_models import Late

pytestmark = pytest.mark.mlx
mx: Any = Late("mlx.core")
theirs: Any = Late("mlx_lm.models.cache")
prefix_cache: Any = Late("engine.cache.prefix_cache")

PIECES = (40, 80, 110, 150)
LONG = random.Random(1).choices(range(64), k=PIECES[-1])
ANSWER = random.Random(2).choices(range(64), k=WINDOW + 4)


@pytest.fixture(scope="module")
def models() -> Callable[[str], Tiny]:
    return functools.cache(Tiny)


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny(models: Callable[[str], Tiny], name: str) -> Tiny:
    return models(name)


@pytest.fixture
def llama(models: Callable[[str], Tiny]) -> Tiny:
    return models("llama")


def other(tokens: list[int]) -> list[int]:
    """Return tokens that differ at every position."""
    return [(token + 1) % 64 for token in tokens]


def assert_close(found: list[Any], wanted: list[Any]) -> None:
    for one, two in zip(found, wanted, strict=True):
        assert mx.allclose(one, two, rtol=1e-3, atol=1e-3).item()
        assert mx.argmax(one).item() == mx.argmax(two).item()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.ci] if name in ("mamba", "falcon_h1", "keeping") else []
        )
        for name in CONFIGS
    ],
)
@pytest.mark.parametrize(
    "same", [pytest.param(10, marks=pytest.mark.ci), 103, pytest.param(150, marks=pytest.mark.ci)]
)
def test_continuing_equals_reading_everything(tiny: Tiny, name: str, same: int) -> None:
    cache = tiny.cache()
    tiny.read_and_store(cache, LONG, PIECES)
    prompt = [*LONG[:same], *other(LONG[same:])[:20], 5]
    ends = [0, *(end for end in PIECES if end <= same)]
    assert cache.match(prompt) == (ends[-1] if name in RECURRENT else same)
    caches, length = cache.fetch(prompt)
    assert length == cache.match(prompt)
    # Once beyond the window, so that what was put back goes round.
    answer = ANSWER if same == 103 else []
    found = tiny.say(caches, prompt[length:], answer)
    assert_close(found, tiny.say(tiny.make(), prompt, answer))


def test_continuing_after_an_answer(tiny: Tiny) -> None:
    cache, caches = tiny.cache(), tiny.make()
    tiny.say(caches, LONG, ANSWER)
    first = [*LONG, *ANSWER]
    cache.store(first, caches)
    caches, length = cache.fetch([*first, 7, 8, 9])
    assert length == len(first)
    assert_close(tiny.say(caches, [7, 8, 9]), tiny.say(tiny.make(), [*first, 7, 8, 9]))


def test_fetched_caches_belong_to_the_caller(tiny: Tiny) -> None:
    cache = tiny.cache()
    given = tiny.read_and_store(cache, LONG, PIECES)
    prompt = [*LONG, 5]
    spoiled, length = cache.fetch(prompt)
    tiny.say(spoiled, other(ANSWER), other(LONG)[:5])
    tiny.say(given, other(ANSWER), other(LONG)[:5])
    held = cache.nbytes
    cache.trim(0)
    assert cache.nbytes == 0 < held
    tiny.read_and_store(cache, LONG, PIECES)
    first, _ = cache.fetch(prompt)
    tiny.say(first, other(ANSWER), other(LONG)[:5])
    second, _ = cache.fetch(prompt)
    assert_close(tiny.say(second, prompt[length:]), tiny.say(tiny.make(), prompt))


def test_the_reported_size_is_real_and_trimming_frees_it(tiny: Tiny) -> None:
    cache = tiny.cache()
    gc.collect()
    mx.clear_cache()  # a larger buffer that is free would be used, and counted whole
    gc.disable()  # it must not take a collection to free what was forgotten
    try:
        before = mx.get_active_memory()
        tiny.read_and_store(cache, LONG, PIECES)
        stats = cache.stats
        arrays = stats.nbytes - NODE_BYTES * stats.entries
        assert stats.stored_bytes >= arrays > 0
        # MLX rounds the size of each buffer up.
        assert mx.get_active_memory() - before == pytest.approx(arrays, rel=0.2, abs=8192)
        cache.fetch([*LONG, 5])
        cache.trim(stats.nbytes // 2)
        arrays = cache.nbytes - NODE_BYTES * cache.stats.entries
        assert cache.nbytes <= stats.nbytes // 2
        assert mx.get_active_memory() - before == pytest.approx(arrays, rel=0.2, abs=8192)
        cache.trim(0)
        assert (cache.nbytes, cache.stats.entries) == (0, 0)
        assert mx.get_active_memory() - before <= 256
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_values_that_do_not_fit_are_left_out(tiny: Tiny) -> None:
    all_of_it = tiny.cache()
    tiny.read_and_store(all_of_it, LONG, PIECES)
    for limit in (1, all_of_it.nbytes // 2, all_of_it.nbytes):
        cache = tiny.cache(limit)
        for tokens in (other(LONG), LONG):
            tiny.read_and_store(cache, tokens, PIECES)
            assert cache.nbytes <= limit
        prompt = [*LONG, 5]
        caches, length = cache.fetch(prompt)
        assert (length == len(LONG)) == (limit == all_of_it.nbytes)
        assert_close(tiny.say(caches, prompt[length:]), tiny.say(tiny.make(), prompt))


def test_a_batch_continues_and_is_stored(tiny: Tiny) -> None:
    cache = tiny.cache()
    tiny.read_and_store(cache, LONG, PIECES)
    prompts = [[*LONG, 5], [9, 8, 7]]
    singles = []
    for prompt in prompts:
        caches, length = cache.fetch(prompt)
        if prompt[length:-1]:
            tiny.read(caches, prompt[length:-1])
        singles.append(caches)
    batch = [column[0].merge(list(column)) for column in zip(*singles, strict=True)]
    answers = [ANSWER, other(ANSWER)]
    columns = [[prompt[-1], *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    for step in zip(*columns, strict=True):
        mx.eval(tiny.model(mx.array([[token] for token in step]), cache=batch))
    for row, prompt in enumerate(prompts):
        tokens = [*prompt, *answers[row]]
        cache.store(tokens, [layer.extract(row) for layer in batch])
        caches, length = cache.fetch([*tokens, 5])
        assert length == len(tokens)
        assert_close(tiny.say(caches, [5]), tiny.say(tiny.make(), [*tokens, 5]))


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_the_cache_implements_its_interface(llama: Tiny, limit: int) -> None:
    cache = llama.cache(limit)
    assert (cache.match([]), cache.match([1]), cache.nbytes) == (0, 0, 0)
    given = llama.read_and_store(cache, LONG, PIECES)
    for tokens in (LONG, LONG[:100], [*LONG, 1], LONG[:1], []):
        known = cache.match(tokens)
        assert cache.match(tokens) == known, "looking changes nothing"
        assert known == (max(0, min(len(LONG), len(tokens) - 1)) if limit else 0)
        caches, length = cache.fetch(tokens)
        assert length == known
        assert [layer.offset for layer in caches] == [length] * len(caches)
        if tokens:
            llama.read(caches, tokens[length:])
    assert [layer.offset for layer in given] == [len(LONG)] * len(given)
    assert (cache.nbytes > 0) == (limit > 0)
    cache.trim(0)
    assert (cache.nbytes, cache.match(LONG)) == (0, 0)


def test_statistics(llama: Tiny) -> None:
    cache = llama.cache()
    llama.read_and_store(cache, LONG, [64, 128, 150])
    stored = cache.stats.stored_bytes
    cache.store(LONG, cache.fetch([*LONG, 5])[0])
    cache.fetch(other(LONG))
    stats = cache.stats
    assert (stats.lookups, stats.hits, stats.entries, stats.evictions) == (2, 1, 3, 0)
    assert (stats.asked_tokens, stats.hit_tokens) == (301, 150)
    assert stats.stored_bytes == stored == stats.nbytes - 3 * NODE_BYTES
    cache.trim(stats.nbytes - 1)
    assert (cache.stats.entries, cache.stats.evictions) == (2, 1)


def test_the_summary_is_the_same_on_every_rank(llama: Tiny) -> None:
    def summary() -> list[str]:
        cache = llama.cache()
        llama.read_and_store(cache, LONG, PIECES)
        llama.read_and_store(cache, [*LONG[:64], *other(LONG[64:])], PIECES)
        cache.fetch(LONG)
        names: list[str] = cache.summary(10)
        assert cache.summary(2) == names[:2]
        return names

    names = summary()
    assert summary() == names
    first = block_hash(b"", encode_tokens(LONG[:64]))
    second = block_hash(first, encode_tokens(LONG[64:128]))
    third = block_hash(first, encode_tokens(other(LONG[64:128])))
    assert names == [first.hex(), second.hex(), third.hex()]


def test_other_caches_are_refused(llama: Tiny) -> None:
    cache = llama.cache()
    with pytest.raises(
        TypeError, match=r"1 layers of RotatingKVCache, but make\(\) makes \w*KVCache"
    ):
        cache.store(LONG, [theirs.RotatingKVCache(max_size=8)])
    llama.read_and_store(cache, LONG, PIECES)
    strange = llama.make()
    for layer in strange:
        layer.update_and_fetch(mx.zeros((1, 3, 8, 32)), mx.zeros((1, 3, 8, 32)))
    with pytest.raises(TypeError, match="one cache is for one model"):
        cache.store([1, 2, 3], strange)


@pytest.mark.parametrize("size", [0, 3, 64])
def test_a_single_array_is_copied(size: int) -> None:
    """Check one layer with one head, where MLX would return a view of the whole buffer."""
    cache = prefix_cache.BlockPrefixCache(lambda: [theirs.KVCache()], limit_bytes=1 << 30)
    caches = [theirs.KVCache()]
    keys = mx.random.normal((1, 1, 20000, 64))
    caches[0].update_and_fetch(keys, mx.random.normal((1, 1, 20000, size)))
    mx.eval(caches[0].state)
    gc.collect()
    before = mx.get_active_memory()
    cache.store(list(range(200)), caches)
    taken = mx.get_active_memory() - before
    found, _ = cache.fetch(list(range(201)))
    assert mx.array_equal(found[0].keys, keys[:, :, :200]).item()
    del caches, keys
    assert taken == pytest.approx(4 * 200 * (64 + size), abs=32768)
    assert mx.get_active_memory() < before
