"""How many bytes of caches sequences need on one model. Pure; `cache/measuring.py` finds the figures.

Sequences of a batch lie in one array, padded on the left, so each of them takes what the longest one needs.

What is held for a moment while tokens are computed, by the memory proof's own formula. Pure.

The proof is the reconciler's (`models/footprint.py`, docs/architecture.md, section 5), whose code an engine
must not need; tests/engine/memory/test_agreement.py holds the two together.

What grows with the requests an engine works on: caches, and what a prompt's prefill needs for a moment. Pure.
"""

from dataclasses import dataclass

from schemas.node import LayerGroup, ModelGeometry

# Caches grow by this many tokens (mlx_lm/models/cache.py; cache/stepped.py, cache/packed.py).
CACHE_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFootprint:
    """Bytes by number of tokens; of two models that are served together, the sum of their rules."""

    constant_bytes: int = 0
    """States that do not grow: linear attention, Mamba, convolutions."""
    token_bytes: int = 0
    """A token's share in all layers that keep every token."""
    windows: tuple[tuple[int, int], ...] = ()
    """(tokens kept at most, a token's bytes) of layers that rotate; one entry a size of window."""

    def __add__(self, other: "KvFootprint") -> "KvFootprint":
        """Return what a sequence needs that is read by two models."""
        return KvFootprint(
            constant_bytes=self.constant_bytes + other.constant_bytes,
            token_bytes=self.token_bytes + other.token_bytes,
            windows=self.windows + other.windows,
        )

    def sequence_bytes(self, tokens: int) -> int:
        """Return what one sequence of so many tokens holds at most: whole steps, which is the memory proof's rounding.

        mlx-lm's own caches, which layers that rotate have, grow by a step from wherever they are full; until the window
        is reached they hold up to 255 tokens' room more than the proof says.
        """
        slots = -(-tokens // CACHE_STEP) * CACHE_STEP
        far = tokens + CACHE_STEP - 1 if tokens else 0
        rotating = sum(each * min(far, window) for window, each in self.windows)
        return self.constant_bytes + self.token_bytes * slots + rotating

    def batch_bytes(self, rows: int, longest: int) -> int:
        """Return what `rows` sequences hold of which the longest has so many tokens."""
        return rows * self.sequence_bytes(longest)

    def reading_bytes(self, chunk: int) -> int:
        """Return what layers that rotate hold beside their windows while a prompt is read in such pieces."""
        return sum(each * chunk for _, each in self.windows)

    def longest_within(self, limit_bytes: int, most: int) -> int:
        """Return how long one sequence may be, of at most `most` tokens; 0 if there is room for none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence_bytes(middle) <= limit_bytes:
                low = middle
            else:
                high = middle - 1
        return low


# Measured with mlx-lm on models of random weights (tests/nodeagent/test_geometry_mlx.py).
_HIDDEN_COPIES, _FFN_COPIES, _SCORE_COPIES, _LOGIT_COPIES = 6, 4, 2, 2
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """What an engine is to be ready for."""

    context_length: int
    """Tokens of one request at most."""
    concurrency: int
    """Requests at once."""
    ranks: int = 1
    kv_bits: int | None = None
    kv_window: int | None = None
    draft_tokens: int = 0
    """How many tokens a draft model guesses at once."""

    @property
    def tokens(self) -> int:
        """What one request's cache holds at most, in whole steps, guesses that are not checked yet included."""
        return -(-(self.context_length + self.draft_tokens) // CACHE_STEP) * CACHE_STEP


def activation_bytes(geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return the worst layer of a piece of prompts, and the logits of all requests."""
    read = geometry.prefill_step * geometry.prefill_batch
    tokens = min(read, load.tokens * load.concurrency)
    ffn = -(-geometry.ffn_size // load.ranks)
    width = _HIDDEN_COPIES * geometry.hidden_size + _FFN_COPIES * ffn
    rows = load.concurrency * (1 + load.draft_tokens)
    logits = _LOGIT_COPIES * rows * geometry.vocab_size * _LOGIT_BYTES
    return tokens * (width * geometry.kv_element_bytes + _score_bytes(geometry, load)) + logits


def _score_bytes(geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return what one token's attention scores take where they are written out."""
    if geometry.is_attention_fused and load.kv_bits is None:
        return 0
    heads = -(-geometry.heads // load.ranks)
    back = max((_lookback(group, geometry, load) for group in geometry.groups), default=0)
    return _SCORE_COPIES * heads * back * geometry.kv_element_bytes


def _lookback(group: LayerGroup, geometry: ModelGeometry, load: ServingLoad) -> int:
    if group.kind == "State":
        return 0
    window = {"Sliding": group.window, "Full": load.kv_window}.get(group.kind)
    if window is None:
        return load.tokens
    return min(load.tokens, window + geometry.prefill_step)


# mlx-lm grows KV caches in steps of 256 tokens (mlx_lm/models/cache.py).
KV_STEP_TOKENS = 256

# Copies of a token's numbers that live at once while a layer is worked on: measured with BatchGenerator on
# models of random weights (tests/nodeagent/test_geometry_mlx.py holds it).
_HIDDEN_COPIES_from_cache = 6
_FFN_COPIES_from_cache = 4
_SCORE_COPIES_from_cache = 2
_LOGIT_COPIES_from_cache = 2
# mlx packs numbers of a quantized cache together under one scale and one bias: 64 of them, or 32 where 64 do not
# divide a head (engine/cache/quantized_kv.py).
_QUANT_GROUP, SMALL_QUANT_GROUP = 64, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How an engine is used, and over how many ranks its model is split."""

    context_length: int
    concurrency: int
    ranks: int = 1
    kv_bits: int | None = None
    """Bits of a number in the cache of layers that keep all tokens; None: as the model computes it."""
    kv_window: int | None = None
    """Tokens that these layers keep at most; None: all."""
    decoded_at_once: int = 1
    """Tokens of each request in a decode step: more than one where a draft model's guesses are checked."""

    @property
    def tokens(self) -> int:
        """Return what one request's cache holds at most."""
        return -(-self.context_length // KV_STEP_TOKENS) * KV_STEP_TOKENS


def cache_bytes(geometry: ModelGeometry, use: EngineLoad) -> int:
    """Return what the caches of all requests hold together, on one rank."""
    return sum(
        group.count * layer_cache_bytes(group, geometry, use) for group in layer_groups(geometry)
    )


def layer_groups(geometry: ModelGeometry) -> tuple[LayerGroup, ...]:
    """Return the model's layers by what they keep; none if nobody understood it."""
    if geometry.groups or geometry.unknown:
        return geometry.groups
    size = geometry.head_dim
    return (
        LayerGroup(
            kind="Full",
            count=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=size,
            value_dim=size,
        ),
    )


def layer_cache_bytes(group: LayerGroup, geometry: ModelGeometry, use: EngineLoad) -> int:
    """Return what the caches of one layer of the group hold for all requests, on one rank."""
    heads = -(-group.kv_heads // use.ranks)
    element = geometry.kv_element_bytes
    per_token = heads * (group.head_dim + group.value_dim) * element
    match group.kind:
        case "Full" if use.kv_window is not None:
            return per_token * _window_tokens(geometry, use.kv_window, use)
        case "Full" if use.kv_bits is not None:
            packed = sum(
                _packed_bytes(n, use.kv_bits, element) for n in (group.head_dim, group.value_dim)
            )
            return heads * packed * use.tokens * use.concurrency
        case "Full":
            return per_token * use.tokens * use.concurrency
        case "Sliding":
            return per_token * _window_tokens(geometry, group.window, use)
        case "Latent":
            # Compressed vectors belong to no head, so every rank keeps them all.
            return group.latent_dim * geometry.kv_element_bytes * use.tokens * use.concurrency
        case "State":
            return -(-group.state_bytes // use.ranks) * use.concurrency


def _packed_bytes(numbers: int, bits: int, element_bytes: int) -> int:
    """Return what one head's key or value takes when it is quantized: words of 32 bits, and the scales and biases."""
    group = _QUANT_GROUP if numbers % _QUANT_GROUP == 0 else SMALL_QUANT_GROUP
    return -(-numbers * bits // 32) * 4 + 2 * -(-numbers // group) * element_bytes


def _window_tokens(geometry: ModelGeometry, window: int, use: EngineLoad) -> int:
    """Return the tokens that a sliding layer keeps for all requests.

    While a prompt is prefilled the layer holds a whole step more: RotatingKVCache drops what left the
    window only afterwards.
    """
    kept = min(use.tokens, window)
    read = min(
        geometry.prefill_step * geometry.prefill_batch, (use.tokens - kept) * use.concurrency
    )
    return kept * use.concurrency + read


def activation_bytes_from_cache(geometry: ModelGeometry, use: EngineLoad) -> int:
    """Return what is held for a moment: the worst layer of a prefill step, and the logits of all requests."""
    if not geometry.hidden_size:
        # A report of an agent that did not say: the logits of a whole step.
        step = min(geometry.prefill_step, use.tokens)
        return step * geometry.vocab_size * _LOGIT_BYTES
    # One long prompt at a time, or several short ones.
    tokens = min(geometry.prefill_step * geometry.prefill_batch, use.tokens * use.concurrency)
    ffn = -(-geometry.ffn_size // use.ranks)
    width = _HIDDEN_COPIES_from_cache * geometry.hidden_size + _FFN_COPIES_from_cache * ffn
    rows = use.concurrency * use.decoded_at_once
    logits = _LOGIT_COPIES_from_cache * rows * geometry.vocab_size * _LOGIT_BYTES
    return (
        tokens * width * geometry.kv_element_bytes
        + _score_bytes_from_cache(geometry, use, tokens)
        + logits
    )


def _score_bytes_from_cache(geometry: ModelGeometry, use: EngineLoad, tokens: int) -> int:
    """Return what attention scores take where they are written out: of every token to all it looks back at."""
    # mlx-lm attends to a quantized cache without the fused kernel (quantized_scaled_dot_product_attention).
    if geometry.is_attention_fused and use.kv_bits is None:
        return 0
    heads = -(-geometry.heads // use.ranks)
    back = max(
        (_lookback_from_cache(group, geometry, use) for group in layer_groups(geometry)), default=0
    )
    return _SCORE_COPIES_from_cache * heads * tokens * back * geometry.kv_element_bytes


def _lookback_from_cache(group: LayerGroup, geometry: ModelGeometry, use: EngineLoad) -> int:
    if group.kind == "State":
        return 0
    window = use.kv_window if group.kind == "Full" else group.window
    if group.kind == "Sliding" or (group.kind == "Full" and window is not None):
        return min(use.tokens, (window or 0) + geometry.prefill_step)
    return use.tokens
