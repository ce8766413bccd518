"""Windows that keep the first tokens: each token sees those and its own window, however the text was read."""

from typing import Any

import pytest

from engine.cache.batch_layout import RowLength
from engine.cache.interface import KvOptions
from tests.support.mlx_models import BASE, Late, build
from tests.support.model_geometries import BASE as FAMILY_BASE
from tests.support.model_geometries import FAMILIES

pytestmark = pytest.mark.mlx
mx: Any = Late("mlx.core")
cache_of_mlx_lm: Any = Late("mlx_lm.models.cache")
layer_caches: Any = Late("engine.cache.layer_caches")
batch_caches: Any = Late("engine.cache.batch_caches")

WINDOW, KEEP = 16, 4
OPTIONS = KvOptions(window=WINDOW, keep=KEEP)
TEXT = [(7 * at + 3) % 60 + 1 for at in range(60)]


@pytest.fixture(scope="module")
def model() -> Any:
    return build(BASE)


def expected(model: Any, tokens: list[int]) -> Any:
    """Return the logits of a whole text that is read at once, with a mask that says what each token sees."""
    at = mx.arange(len(tokens))
    row, column = at[:, None], at[None]
    mask = (column <= row) & ((column < KEEP) | (column > row - (WINDOW - KEEP)))

    class Masked(cache_of_mlx_lm.KVCache):  # type: ignore[misc] # mlx-lm ships no types
        def make_mask(self, *_: Any, **__: Any) -> Any:
            return mask

    return model(mx.array([tokens]), cache=[Masked() for _ in model.layers])[0]


def difference(one: Any, other: Any) -> float:
    return float(mx.max(mx.abs(one - other)).item())


@pytest.mark.parametrize(
    "pieces",
    [[60], [1] * 60, [7, 20, 33], [5, 1, 1, 30, 1, 22], [16, 16, 16, 12], [40, *[1] * 20]],
    ids=lambda pieces: "-".join(map(str, pieces[:6])),
)
def test_a_text_is_read_alike_in_any_pieces(model: Any, pieces: list[int]) -> None:
    caches = layer_caches.make_caches(model, OPTIONS)
    found, start = [], 0
    for count in pieces:
        found.append(model(mx.array([TEXT[start : start + count]]), cache=caches)[0])
        start += count
        if count == 1:
            assert all(cache.keys.shape[2] <= WINDOW for cache in caches)
    assert difference(mx.concatenate(found), expected(model, TEXT)) < 1e-4


def test_the_first_tokens_count(model: Any) -> None:
    plain = layer_caches.make_caches(model, KvOptions(window=WINDOW))
    logits = model(mx.array([TEXT]), cache=plain)[0]
    assert difference(logits[WINDOW:], expected(model, TEXT)[WINDOW:]) > 1e-3


def test_rows_of_a_batch_are_as_alone(model: Any) -> None:
    lengths = (5, 40, 15)
    texts = [[(at + length) % 60 + 1 for at in range(length + 24)] for length in lengths]
    singles = []
    for length, text in zip(lengths, texts, strict=True):
        singles.append(layer_caches.make_caches(model, OPTIONS))
        model(mx.array([text[:length]]), cache=singles[-1])
    batch = batch_caches.BatchCaches(by_rows=True)
    batch.join(batch_caches.merge_caches(singles, by_rows=True))
    rows = [0, 1, 2]
    for step in range(24):
        if step == 12:  # a row leaves, and another one comes back from a copy
            copied = batch.extract(1)
            batch.keep([0, 2])
            batch.join(batch_caches.merge_caches([copied], by_rows=True))
            rows = [0, 2, 1]
        batch.arrange([RowLength(lengths[at] + step + 1, 256) for at in rows])
        fed = [[texts[at][lengths[at] + step]] for at in rows]
        logits = model(mx.array(fed), cache=batch.layers)[:, -1]
        for row, at in zip(logits, rows, strict=True):
            wanted = expected(model, texts[at][: lengths[at] + step + 1])[-1]
            assert difference(row, wanted) < 1e-4, (step, at)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text"])
def test_rows_with_sinks_and_shared_layers_are_as_alone(family: str) -> None:
    model = build({**FAMILY_BASE, "model_type": family, **FAMILIES[family]})
    layer_caches.try_model(model, OPTIONS)
    batch = batch_caches.BatchCaches(by_rows=True)
    alone: list[Any] = []
    for length in (5, 40):
        pair = [layer_caches.make_caches(model, OPTIONS) for _ in range(2)]
        for caches in pair:
            model(mx.array([TEXT[:length]]), cache=caches)
        batch.join(batch_caches.merge_caches(pair[:1], by_rows=True))
        alone.append(pair[1])
    for token in range(1, 24):
        logits = model(mx.array([[token], [token + 9]]), cache=batch.layers)
        for row, caches in enumerate(alone):
            single = model(mx.array([[token + 9 * row]]), cache=caches)
            assert difference(logits[row], single[0]) < 1e-4, (token, row)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_models_that_need_one_mask_for_all_requests_are_refused_by_name(family: str) -> None:
    config = {**FAMILY_BASE, "model_type": family, **FAMILIES[family]}
    if "text_config" in config:
        config = {"model_type": family, "vocab_size": 64, "text_config": config["text_config"]}
    with pytest.raises(ValueError, match=r"this model cannot use kvCache\.keep"):
        layer_caches.try_model(build(config), OPTIONS)


@pytest.mark.parametrize("options", [KvOptions(keep=4), KvOptions(window=16, keep=9)])
def test_a_window_is_at_least_twice_what_it_keeps(model: Any, options: KvOptions) -> None:
    with pytest.raises(ValueError, match=r"kvCache\.keep must be at most half"):
        layer_caches.make_caches(model, options)
