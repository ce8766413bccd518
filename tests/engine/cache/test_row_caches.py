"""Caches of single rows beside padded ones: the same contract, and the same numbers for every architecture."""

from typing import Any

import pytest

from engine.cache.batch_layout import RowLength
from engine.cache.interface import KvOptions
from tests.support.mlx_models import BASE, GEMMA, Late, build
from tests.support.model_geometries import BASE as FAMILY_BASE
from tests.support.model_geometries import FAMILIES

pytestmark = pytest.mark.mlx
mx: Any = Late("mlx.core")
nn: Any = Late("mlx.nn")
layer_caches: Any = Late("engine.cache.layer_caches")
batch_caches: Any = Late("engine.cache.batch_caches")
row_caches: Any = Late("engine.cache.row_caches")
stepped_kv: Any = Late("engine.cache.stepped_kv")

OPTIONS = {"plain": KvOptions(), "packed": KvOptions(bits=8)}
LENGTHS = (5, 300, 37)
# Padded: a cache for an index. The others have no keys, and states are never padded.
PADDED = {"deepseek_v32", "mamba", "mamba2"}
QUICK = {"llama", "gpt_oss", "gemma3_text", "lfm2", "deepseek_v3"}


def prompt(length: int) -> list[int]:
    return [(7 * at + length) % 60 + 1 for at in range(length)]


def read(model: Any, options: KvOptions, length: int, *, reserved: int | None = None) -> list[Any]:
    """Return the caches of one sequence after a prompt."""
    caches: list[Any] = layer_caches.make_caches(model, options)
    batch_caches.set_reserved(caches, reserved)
    model(mx.array([prompt(length)]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


class Batch:
    """Rows that decode fixed tokens, kept in one of the two layouts."""

    def __init__(self, model: Any, options: KvOptions, *, by_rows: bool) -> None:
        self.model, self.options, self.by_rows = model, options, by_rows
        self.caches: Any = batch_caches.BatchCaches(by_rows=by_rows)
        self.logits: list[Any] = []

    def join(self, *lengths: int, reserved: int | None = None) -> None:
        singles = [read(self.model, self.options, length, reserved=reserved) for length in lengths]
        self.caches.join(batch_caches.merge_caches(singles, by_rows=self.by_rows))

    def step(self, *tokens: int, count: int = 1) -> None:
        """Feed `count` tokens to each row."""
        found = [[(token + at) % 60 for at in range(count)] for token in tokens]
        self.logits.append(self.model(mx.array(found), cache=self.caches.layers))
        mx.eval(self.logits[-1])

    def trim(self, count: int) -> None:
        for cache in self.caches.layers:
            cache.trim(count)


def difference(ours: list[Any], theirs: list[Any]) -> float:
    return max(
        float(mx.max(mx.abs(one - other)).item()) for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in QUICK else pytest.mark.ci) for one in FAMILIES]
)
def test_every_architecture_computes_the_same_by_rows_or_is_padded(family: str) -> None:
    config = {**FAMILY_BASE, "model_type": family, **FAMILIES[family]}
    if "text_config" in config:
        config = {"model_type": family, "vocab_size": 64, "text_config": config["text_config"]}
    model = build(config)
    assert layer_caches.can_hold_rows(model, KvOptions()) == (family not in PADDED)
    if family in PADDED:
        return
    ours, theirs = (Batch(model, KvOptions(), by_rows=by_rows) for by_rows in (True, False))
    for batch in (ours, theirs):
        batch.join(*LENGTHS)
        for token in (1, 30, 7):
            batch.step(token, token + 8, token + 3)
    assert difference(ours.logits, theirs.logits) < 1e-4
    assert difference(ours.logits[:1], ours.logits[1:2]) > 1e-2


def test_quantized_latents_are_padded_only_while_prompts_are_read_together() -> None:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    model = build({**FAMILY_BASE, **FAMILIES["deepseek_v3"], "model_type": "deepseek_v3", **sizes})
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda path, _: "embed" in path)
    can_use = layer_caches.can_hold_rows, layer_caches.can_read_rows
    assert [can(model, KvOptions()) for can in can_use] == [True, False]
    ours, theirs = (Batch(model, KvOptions(), by_rows=by_rows) for by_rows in (True, False))
    for batch in (ours, theirs):
        singles = [read(model, KvOptions(), length) for length in LENGTHS]
        batch.caches.join(batch_caches.merge_caches(singles, by_rows=False))
        batch.step(1, 2, 3)
        batch.join(9)
        batch.step(4, 5, 6, 7)
    assert [cache.offset.tolist() for cache in ours.caches.layers] == [[7, 302, 39, 10]] * 6
    assert difference(ours.logits, theirs.logits) < 1e-4


@pytest.mark.parametrize("kind", OPTIONS)
def test_rows_join_leave_and_are_trimmed_as_in_a_padded_batch(kind: str) -> None:
    model = build(BASE)
    batches = [Batch(model, OPTIONS[kind], by_rows=by_rows) for by_rows in (True, False)]
    assert layer_caches.can_hold_rows(model, OPTIONS[kind])
    for batch in batches:
        batch.join(5, 300)
        batch.step(3, 4)
        batch.join(37)
        batch.step(5, 6, 7)
        batch.caches.keep([0, 2])
        batch.step(8, 9)
        batch.caches.keep([1])
        batch.step(1, count=4)  # guesses, of which three are wrong
        batch.trim(3)
        batch.step(2)
    ours, theirs = batches
    assert difference(ours.logits, theirs.logits) < 1e-4
    assert [len(cache.rows) for cache in ours.caches.layers] == [1] * 4
    assert [cache.offset.tolist() for cache in ours.caches.layers] == [[41]] * 4
    ours.caches.keep([])
    assert ours.caches.layers == []


@pytest.mark.parametrize("kind", OPTIONS)
def test_rows_become_padded_and_single_again(kind: str) -> None:
    model = build(BASE)
    ours, theirs = (Batch(model, OPTIONS[kind], by_rows=by_rows) for by_rows in (True, False))
    alike = [RowLength(tokens, 1024) for tokens in (290, 300)]
    for batch in (ours, theirs):
        batch.join(290, 300)
        batch.step(3, 4)
    for _ in range(65):
        ours.caches.arrange(alike)
    assert ours.caches.is_padded
    for batch in (ours, theirs):
        batch.step(5, 6)
        batch.join(5)  # a row that is not alike
        batch.step(7, 8, 9)
        batch.step(7, 8, 9)
    assert not ours.caches.is_padded
    ours.caches.arrange([*alike, RowLength(8, 1024)])
    assert not ours.caches.is_padded
    assert difference(ours.logits, theirs.logits) < 1e-4
    # Whole steps for each row as far as it has memory, and no padding.
    footprint = layer_caches.measure_footprint(model, OPTIONS[kind])
    assert ours.caches.nbytes == footprint.batch_bytes([512, 512, 256])
    assert 5 * theirs.caches.nbytes == 6 * ours.caches.nbytes


@pytest.mark.ci
@pytest.mark.parametrize("kind", OPTIONS)
def test_neither_layout_takes_more_memory_than_its_rows_were_promised(kind: str) -> None:
    model = build(BASE)
    footprint = layer_caches.measure_footprint(model, OPTIONS[kind])
    batch = Batch(model, OPTIONS[kind], by_rows=True)
    batch.join(290, 292, 295, reserved=300)
    rows = [
        RowLength(tokens, promised) for tokens, promised in ((290, 384), (292, 460), (295, 320))
    ]
    layouts: set[bool] = set()
    for at in range(120):
        rows = [RowLength(row.tokens + 1, max(row.promised, row.tokens + 1)) for row in rows]
        if at == 100:
            batch.caches.keep([0, 2])
            rows = [rows[0], rows[2]]
        batch.caches.arrange(rows)
        layouts.add(batch.caches.is_padded)
        batch.step(*([at % 50 + 1] * len(rows)))
        promised = footprint.batch_bytes([row.promised for row in rows])
        assert batch.caches.nbytes <= promised, (at, batch.caches.is_padded)
    assert layouts == {True, False}


def test_prompts_that_are_read_together_leave_no_room_for_their_padding() -> None:
    model = build(BASE)
    options = KvOptions()
    lengths, rows = (250, 300, 5), 3
    alone = [read(model, options, length) for length in lengths]
    singles = [layer_caches.make_caches(model, options) for _ in lengths]
    for single, length in zip(singles, lengths, strict=True):
        batch_caches.set_reserved(single, length)
    caches = batch_caches.merge_caches(singles, by_rows=True)
    padding = [300 - length for length in lengths]
    tokens = [prompt(length) + [0] * pad for length, pad in zip(lengths, padding, strict=True)]
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    model(mx.array(tokens), cache=caches)
    for cache in caches:
        cache.finalize()
    assert [cache.offset.tolist() for cache in caches] == [list(lengths)] * 4
    footprint = layer_caches.measure_footprint(model, options)
    assert sum(cache.nbytes for cache in caches) == footprint.batch_bytes(lengths)
    last = mx.array([[9]] * rows)
    together = model(last, cache=caches)
    for at in range(rows):
        single = model(last[:1], cache=alone[at])
        assert difference([together[at : at + 1]], [single]) < 1e-4


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_extracted_row_is_not_changed_by_the_batch(kind: str) -> None:
    model = build(BASE)
    batch = Batch(model, OPTIONS[kind], by_rows=True)
    batch.join(37, 256)
    alone = batch.caches.extract(1)
    before = mx.array(alone[0].keys[0] if kind == "packed" else alone[0].keys)
    mx.eval(before)
    batch.step(3, 4)
    batch.trim(1)
    batch.step(5, 6)
    after = alone[0].keys[0] if kind == "packed" else alone[0].keys
    assert (alone[0].offset, alone[0].size()) == (256, 256)
    assert bool(mx.array_equal(before, after))
    # It continues as the row did, and the row does not notice.
    logits = model(mx.array([[6]]), cache=alone)
    assert difference([logits], [batch.logits[-1][1:]]) < 1e-4
    assert batch.caches.extract(1)[0].offset == 257


def test_a_mask_that_differs_between_rows_is_that_of_a_padded_batch() -> None:
    model = build(GEMMA)
    batch = Batch(model, KvOptions(), by_rows=True)
    batch.join(5, 9)
    full = next(c for c in batch.caches.layers if isinstance(c, row_caches.RowsKVCache))
    assert full.make_mask(1) is None
    assert full.make_mask(3) == "causal"
    padded = stepped_kv.BatchSteppedKVCache.merge(full.rows)
    assert mx.array_equal(full.make_mask(3, return_array=True), padded.make_mask(3))
    assert mx.array_equal(full.make_mask(1, window_size=4), padded.make_mask(1, window_size=4))
    batch.caches.keep([1])
    assert full.make_mask(3, return_array=True).shape == (3, 12)
