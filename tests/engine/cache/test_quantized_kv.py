"""Batched quantized caches compared with mlx-lm's for one sequence: the same tokens, in any batch."""

from typing import Any

import pytest

from engine.cache.interface import KvOptions
from tests.support import tiny_model
from tests.support.mlx_models import BASE, GEMMA, MAMBA, Late, build

pytestmark = pytest.mark.mlx
mx: Any = Late("mlx.core")
theirs: Any = Late("mlx_lm.models.cache")
layer_caches: Any = Late("engine.cache.layer_caches")
quantized_kv: Any = Late("engine.cache.quantized_kv")
stepped_kv: Any = Late("engine.cache.stepped_kv")

PROMPTS = [list(range(5, 5 + 40)), [7, 8, 9], list(range(100, 117)), [300]]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models") / str(request.param)
    # Heads of 64, the group of mlx-lm's default; two share a key, so the grouped path is taken.
    tiny_model.make(folder, arch=request.param, hidden=128, heads=2, kv_heads=1)
    return Late("mlx_lm.utils").load_model(folder)[0]


def greedy(model: Any, caches: list[Any], prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of one sequence alone."""
    logits = model(mx.array([prompt]), cache=caches)
    found = [int(mx.argmax(logits[0, -1]).item())]
    while len(found) < count:
        logits = model(mx.array([found[-1:]]), cache=caches)
        found.append(int(mx.argmax(logits[0, -1]).item()))
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 31, 32, 90])
@pytest.mark.parametrize("kind", ["causal", "array", "none"])
def test_attention_over_unpacked_numbers_is_that_of_mlx_lm(
    bits: int, count: int, kind: str
) -> None:
    """Pieces of prompts are read with the kernel of plain caches, which stores no scores."""
    base, rows = Late("mlx_lm.models.base"), Late("engine.cache.row_caches")
    rows.hook_attention()
    hooked = base.quantized_scaled_dot_product_attention
    mx.random.seed(bits)
    keys, values = (
        mx.quantize(mx.random.normal((2, 2, 120, 64)), group_size=64, bits=bits) for _ in range(2)
    )
    queries = mx.random.normal((2, 4, count, 64))
    at = mx.arange(120)
    masks = {"causal": "causal", "none": None, "array": at[None] >= at[:count, None] + 5}
    options = {"scale": 0.125, "mask": masks[kind], "group_size": 64, "bits": bits}
    ours = hooked(mx.array(queries), keys, values, **options)
    theirs_ = hooked.theirs(mx.array(queries), keys, values, **options)
    assert mx.allclose(ours, theirs_, atol=1e-4).item()


class Batch:
    """Rows that decode together: a minimal batch."""

    def __init__(self, model: Any, options: KvOptions) -> None:
        self.model, self.options = model, options
        self.caches: list[Any] = []
        self.rows: list[list[int]] = []

    def join(self, prompts: list[list[int]]) -> None:
        """Prefill each prompt alone, without its last token, and add it as a row."""
        singles = []
        for prompt in prompts:
            caches = layer_caches.make_caches(self.model, self.options)
            if len(prompt) > 1:
                self.model(mx.array([prompt[:-1]]), cache=caches)
            singles.append(caches)
        merged = [column[0].merge(list(column)) for column in zip(*singles, strict=True)]
        if self.caches:
            for mine, new in zip(self.caches, merged, strict=True):
                mine.extend(new)
        else:
            self.caches = merged
        self.rows += [prompt[-1:] for prompt in prompts]

    def keep(self, rows: list[int]) -> list[list[int]]:
        """Keep only some rows; return the tokens of the others."""
        gone = [row[1:] for at, row in enumerate(self.rows) if at not in rows]
        for cache in self.caches:
            cache.filter(rows)
        self.rows = [self.rows[at] for at in rows]
        return gone

    def step(self, count: int) -> None:
        for _ in range(count):
            last = mx.array([row[-1:] for row in self.rows])
            logits = self.model(last, cache=self.caches)
            for row, token in zip(
                self.rows, mx.argmax(logits[:, -1], axis=-1).tolist(), strict=True
            ):
                row.append(token)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_rows_that_join_and_leave_give_the_answers_of_single_sequences(
    model: Any, bits: int | None
) -> None:
    long, short, middle, lone = PROMPTS

    def caches() -> list[Any]:
        """mlx-lm's own."""
        if bits is None:
            return [theirs.KVCache() for _ in model.layers]
        return [theirs.QuantizedKVCache(bits=bits) for _ in model.layers]

    alone = {at: greedy(model, caches(), prompt, 24) for at, prompt in enumerate(PROMPTS)}
    batch = Batch(model, KvOptions(bits=bits))
    batch.join([short, long])
    batch.step(6)
    batch.join([lone, middle])  # one of them with an empty cache
    batch.step(10)
    (of_long,) = batch.keep([0, 2, 3])
    batch.step(8)
    of_short, of_lone, of_middle = (row[1:] for row in batch.rows)
    assert of_long == alone[0][:16]
    assert of_short == alone[1]
    assert of_middle == alone[2][:18]
    assert of_lone == alone[3][:18]


def test_rows_in_a_window_give_the_answers_of_single_sequences(model: Any) -> None:
    """Rows wrap around at different times, and one joins that has wrapped around already."""
    options = KvOptions(window=20)
    long, short, middle, lone = PROMPTS
    alone = [
        greedy(model, layer_caches.make_caches(model, options), prompt, 30) for prompt in PROMPTS
    ]
    batch = Batch(model, options)
    batch.join([short, middle])
    batch.step(12)
    batch.join([long, lone])
    batch.step(12)
    gone = batch.keep([0, 2, 3])
    batch.step(6)
    of_short, of_long, of_lone = (row[1:] for row in batch.rows)
    assert gone == [alone[2][:24]]
    assert of_short == alone[1]
    assert of_long == alone[0][:18]
    assert of_lone == alone[3][:18]


@pytest.mark.parametrize("bits", [None, 8])
def test_prompts_read_together_give_the_answers_of_single_sequences(
    model: Any, bits: int | None
) -> None:
    options = KvOptions(bits=bits)
    alone = [
        greedy(model, layer_caches.make_caches(model, options), prompt, 8) for prompt in PROMPTS
    ]
    lengths = [len(prompt) - 1 for prompt in PROMPTS]
    padding = [max(lengths) - length for length in lengths]
    rows = [prompt[:-1] + [0] * pad for prompt, pad in zip(PROMPTS, padding, strict=True)]
    batch = Batch(model, options)
    empty = [layer_caches.make_caches(model, options) for _ in PROMPTS]
    batch.caches = [column[0].merge(list(column)) for column in zip(*empty, strict=True)]
    for cache in batch.caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    model(mx.array(rows), cache=batch.caches)
    for cache in batch.caches:
        cache.finalize()
    batch.rows = [prompt[-1:] for prompt in PROMPTS]
    batch.step(8)
    assert [row[1:] for row in batch.rows] == alone


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_values_survive_and_take_less_memory(bits: int) -> None:
    plain: Any = stepped_kv.SteppedKVCache()
    small: Any = quantized_kv.QuantizedCache(bits)
    for tokens in (1, 300, 7):
        keys, values = (mx.random.normal((1, 2, tokens, 128)) for _ in range(2))
        plain.update_and_fetch(keys, values)
        small.update_and_fetch(keys, values)
    wide, held = plain.keys_and_values()[0], small.keys_and_values()[0]
    back = mx.dequantize(*held, group_size=64, bits=bits)
    step = (mx.max(wide) - mx.min(wide)).item() / (2**bits - 1)
    assert float(mx.max(mx.abs(back - wide)).item()) <= step
    # Of 32-bit floats: bits a number, and a scale and a bias for every 64.
    assert small.nbytes == plain.nbytes * (bits + 1) // 32


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_empty_caches_merge_extend_and_leave(kind: str) -> None:
    empty = quantized_kv.QuantizedCache(4) if kind == "packed" else stepped_kv.SteppedKVCache()
    one: Any = empty.merge([empty])
    two = empty.merge([empty] * 2)
    one.extend(two)
    one.filter([0, 2])
    assert (one.empty(), one.size(), one.nbytes, one.offset.tolist()) == (True, 0, 0, [0, 0])
    assert one.extract(1).empty()


def test_caches_of_different_bits_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="different"):
        quantized_kv.QuantizedCache.merge(
            [quantized_kv.QuantizedCache(4), quantized_kv.QuantizedCache(8)]
        )


def test_rotating_layers_are_not_replaced() -> None:
    model = build(GEMMA)
    assert (
        layer_caches.try_model(model, KvOptions(bits=4))
        == "2 x RotatingKVCache, 2 x QuantizedCache"
    )
    assert layer_caches.try_model(model, KvOptions()) == "2 x RotatingKVCache, 2 x SteppedKVCache"
    caches = layer_caches.make_caches(model, KvOptions(window=100))
    assert layer_caches.count_kinds(caches) == {"RotatingKVCache": 4}
    assert [cache.max_size for cache in caches] == [64, 100, 64, 100]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (KvOptions(bits=4, window=100), "leave one out"),
        (KvOptions(bits=5), "one of 2, 3, 4, 6, 8, not 5"),
        (KvOptions(window=15), "at least 16, not 15"),
        (KvOptions(bits=4), "a multiple of 32.* have 16 numbers"),
    ],
)
def test_invalid_options_are_refused(options: KvOptions, reason: str) -> None:
    model = build({**BASE, "model_type": "qwen2", "num_attention_heads": 4})
    with pytest.raises(ValueError, match=reason):
        layer_caches.try_model(model, options)


def test_a_model_without_plain_kv_caches_refuses_options() -> None:
    with pytest.raises(ValueError, match="it has ArraysCache"):
        layer_caches.try_model(build(MAMBA), KvOptions(bits=8))
