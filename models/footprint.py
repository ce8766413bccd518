"""The memory proof's formula: bytes of KV caches and activations of a model under a load. Pure.

The reconciler's placement proof and the engine's admission both use it. Parts and sources: docs/internals/memory-proof.md.
Which caches an architecture has: `cache_rules.py`.
Measured with mlx-lm on models of random weights (tests/models/test_cache_rules_mlx.py).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from schemas.node import LayerGroup, ModelGeometry, VisionTower

CACHE_STEP: Final = 256
"""KV caches grow by this many tokens (mlx_lm/models/cache.py; engine/cache/stepped_kv.py, engine/cache/quantized_kv.py)."""
CHECKPOINT_STEP: Final = 512
MAX_CHECKPOINT_TOKENS: Final = 8192
"""Least and most tokens of a prompt between two copies of its states and windows in the prefix cache."""
ROW_STEP: Final = 64
"""Memory of a row with caches of its own is counted, and given to it, in steps of this many tokens."""
BLOCK_TOKEN_BYTES: Final = 32
"""Bytes of a cached token beside its keys and values: 2 KiB a block of 64 (engine/cache/block_tree.py)."""


def round_up(tokens: int, step: int = CACHE_STEP) -> int:
    """Return the least number of whole steps that hold this many tokens."""
    return -(-tokens // step) * step


def cache_slots(tokens: int, reserved: int | None) -> int:
    """Return the tokens for which a cache that must hold `tokens` allocates memory.

    It grows by whole steps of 256 tokens as far as `reserved` allows, the tokens for which it has memory, and by the
    small steps of rows beyond that. Without `reserved` there is memory for whole steps.
    """
    whole = round_up(tokens)
    if reserved is None:
        return whole
    return max(round_up(tokens, ROW_STEP), min(whole, round_up(reserved, ROW_STEP)))


# Arrays of a token's width that are alive at once while a layer is computed.
_HIDDEN_COPIES, _FFN_COPIES, _SCORE_COPIES, _LOGIT_COPIES = 6, 4, 2, 2
_LOGIT_BYTES = 4
# mlx quantizes a cache in groups of 64 numbers with one scale and one bias, or of 32 where 64 does not divide a head
# (engine/cache/quantized_kv.py).
_QUANT_GROUP, SMALL_QUANT_GROUP = 64, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """The requests that an engine must be ready for, and the ranks over which its model is split."""

    context_length: int
    """Tokens of one request at most, prompt and completion."""
    concurrency: int
    """Requests at the same time."""
    ranks: int = 1
    kv_tokens: int | None = None
    """Tokens of all requests together in layers that keep all tokens; None: each request may have all of its context."""
    kv_bits: int | None = None
    """Bits of a number in the caches of layers that keep all tokens; None: as the model computes it."""
    kv_window: int | None = None
    """Tokens that these layers keep at most; None: all."""
    draft_tokens: int = 0
    """Tokens that are guessed at once; the model caches them before it knows which are right."""
    has_mtp: bool = False
    """True if a multi-token prediction head guesses them."""
    image_pixels: int = 0
    """Pixels that the model sees of one image; 0 for a model that reads text only."""
    images: int = 0
    """Images of one request."""

    @property
    def tokens(self) -> int:
        """The size of one request's cache in tokens: whole steps, with unverified draft tokens."""
        return round_up(self.context_length + self.draft_tokens)

    @property
    def all_tokens(self) -> int:
        """The size of the caches of all requests in tokens; at least one request of the whole context."""
        full = self.tokens * self.concurrency
        return full if self.kv_tokens is None else min(full, max(self.tokens, self.kv_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFootprint:
    """Cache bytes of sequences as a function of their tokens, measured on a loaded model."""

    constant_bytes: int = 0
    """States that do not grow: linear attention, Mamba, convolutions."""
    token_bytes: int = 0
    """Bytes of one token in all layers that keep every token."""
    windows: tuple[tuple[int, int], ...] = ()
    """(tokens kept at most, bytes of one token) of layers with rotating caches; one entry for each window size."""
    by_rows: bool = False
    """True if a batch can keep the tokens of each sequence in arrays of their own (engine/cache/row_caches.py).

    Otherwise the sequences share one array, padded on the left, and each takes the bytes of the longest. Rotating
    caches always do, up to their window.
    """

    def __add__(self, other: "KvFootprint") -> "KvFootprint":
        """Return the footprint of a sequence that two models process, such as a model and its draft model."""
        return KvFootprint(
            constant_bytes=self.constant_bytes + other.constant_bytes,
            token_bytes=self.token_bytes + other.token_bytes,
            windows=self.windows + other.windows,
            by_rows=self.by_rows and other.by_rows,
        )

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of one sequence at most: whole steps, those of rows if a batch keeps rows apart.

        mlx-lm's rotating caches grow by a step from the length at which they are full; until the window is reached
        they hold up to 255 tokens more than `cache_bytes` counts.
        """
        return self.token_bytes * self._slots(tokens) + self._fixed_bytes(tokens)

    def batch_bytes(self, lengths: Collection[int]) -> int:
        """Return the most bytes of sequences of these lengths together."""
        longest = max(lengths, default=0)
        if not self.by_rows:
            return len(lengths) * self.sequence_bytes(longest)
        tokens = sum(map(self._slots, lengths))
        return self.token_bytes * tokens + len(lengths) * self._fixed_bytes(longest)

    def load_bytes(self, load: ServingLoad) -> int:
        """Return the bytes of the caches of all requests of a load."""
        fixed = self._fixed_bytes(load.context_length + load.draft_tokens)
        return self.token_bytes * load.all_tokens + load.concurrency * fixed

    def _slots(self, tokens: int) -> int:
        return round_up(tokens, ROW_STEP if self.by_rows else CACHE_STEP)

    def _fixed_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence's states and rotating layers, beside others of at most `tokens` tokens."""
        rotating_tokens = tokens + CACHE_STEP - 1 if tokens else 0
        rotating = sum(each * min(rotating_tokens, window) for window, each in self.windows)
        return self.constant_bytes + rotating

    def kept_bytes(self, tokens: int, *, by_token: bool) -> int:
        """Return what `kept_bytes` of this module counts, for a sequence of at most `tokens` tokens."""
        return self._fixed_bytes(tokens) if by_token or self.constant_bytes else 0

    @property
    def checkpoint_tokens(self) -> int:
        """The tokens between two checkpoints of a prompt in the prefix cache; 0 if it needs none.

        A checkpoint copies states and windows, whose sizes do not depend on the prompt. At this distance, copies take
        at most as much memory and disk as the keys and values of all tokens, unless that is above the maximum.
        """
        size = self.constant_bytes + sum(window * each for window, each in self.windows)
        if not size:
            return 0
        tokens = round_up(size // (self.token_bytes + BLOCK_TOKEN_BYTES), CHECKPOINT_STEP)
        return min(max(tokens, CHECKPOINT_STEP), MAX_CHECKPOINT_TOKENS)

    def reading_bytes(self, chunk: int) -> int:
        """Return the bytes beside their windows of rotating layers while a prompt is prefilled in chunks of tokens."""
        return sum(each * chunk for _, each in self.windows)

    def longest_within(self, limit_bytes: int, most: int) -> int:
        """Return the length of the longest sequence that fits, at most `most` tokens; 0 if none fits."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence_bytes(middle) <= limit_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def token_expert_bytes(geometry: ModelGeometry) -> int:
    """Return the bytes of routed experts that one token reads; all of them if their number is not known."""
    if not geometry.experts or not geometry.experts_of_token:
        return geometry.expert_bytes
    return geometry.expert_bytes * geometry.experts_of_token // geometry.experts


def token_read_bytes(geometry: ModelGeometry) -> int:
    """Return the bytes of weights that one token reads: without other experts, and without tables but for a row."""
    idle = geometry.expert_bytes - token_expert_bytes(geometry)
    return geometry.weights_bytes - geometry.looked_up_bytes - idle


def cache_bytes(geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return the bytes of the caches of all requests together, on one rank."""
    return sum(
        group.count * layer_cache_bytes(group, geometry, load) for group in layer_groups(geometry)
    )


def layer_groups(geometry: ModelGeometry) -> tuple[LayerGroup, ...]:
    """Return the model's layers by the caches they keep; () if its architecture is unknown."""
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


def layer_cache_bytes(group: LayerGroup, geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return the bytes of the caches of one layer of the group for all requests, on one rank."""
    heads = -(-group.kv_heads // load.ranks)
    element = geometry.kv_element_bytes
    per_token = heads * (group.head_dim + group.value_dim) * element
    match group.kind:
        case "Full" if load.kv_window is not None:
            return per_token * _window_tokens(geometry, load.kv_window, load)
        case "Full" if load.kv_bits is not None:
            packed = sum(
                _quantized_bytes(n, load.kv_bits, element)
                for n in (group.head_dim, group.value_dim)
            )
            return heads * packed * load.all_tokens
        case "Full":
            return per_token * load.all_tokens
        case "Sliding":
            return per_token * _window_tokens(geometry, group.window, load)
        case "Latent":
            # Compressed vectors belong to no head, so every rank keeps all of them.
            return group.latent_dim * geometry.kv_element_bytes * load.all_tokens
        case "State":
            return -(-group.state_bytes // load.ranks) * load.concurrency


def _quantized_bytes(numbers: int, bits: int, element_bytes: int) -> int:
    """Return the bytes of one head's quantized key or value: words of 32 bits, and the scales and biases."""
    group = _QUANT_GROUP if numbers % _QUANT_GROUP == 0 else SMALL_QUANT_GROUP
    return -(-numbers * bits // 32) * 4 + 2 * -(-numbers // group) * element_bytes


def _window_tokens(geometry: ModelGeometry, window: int, load: ServingLoad) -> int:
    """Return the tokens that a sliding layer keeps for all requests.

    During a prefill the layer holds a whole step more: RotatingKVCache drops the tokens outside the window only
    afterwards.
    """
    kept = min(load.tokens, window)
    prefilled = min(
        geometry.prefill_step * geometry.prefill_batch, (load.tokens - kept) * load.concurrency
    )
    return kept * load.concurrency + prefilled


# Of Qwen2-VL, for reports of older agents.
_TOWER: Final = VisionTower(patch=14, width=1_280, ffn=5_120, heads=16)
_PIXEL_NUMBERS: Final = 6  # three colors of two frames: models of videos read an image twice

IMAGE_DECODING_BYTES: Final = 192 << 20
"""Bytes that an input worker needs beyond its usual memory to decode an image (engine/vision/image_reader.py)."""


def vision_bytes(geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return the bytes of temporary arrays for the images of requests.

    One request's images pass the tower at a time; what it made of them is kept until the request ends.
    """
    if not load.image_pixels:
        return 0
    tower = geometry.vision or _TOWER
    image_pixels = tower.side**2 or load.image_pixels
    each = -(-image_pixels // tower.patch**2)
    patches = load.images * each
    numbers = _HIDDEN_COPIES * tower.width + _FFN_COPIES * tower.ffn
    pixels = patches * tower.patch**2 * _PIXEL_NUMBERS * 4 + load.images * image_pixels * 3
    # Each patch looks at those of its image; scores exist only without a fused kernel.
    scores = 0 if geometry.is_attention_fused else _SCORE_COPIES * tower.heads * patches * each
    element = geometry.kv_element_bytes
    rows = load.concurrency * load.tokens * geometry.hidden_size * (1 + tower.added_rows)
    work = patches * numbers + scores + rows
    return work * element + pixels + IMAGE_DECODING_BYTES


MTP_KEPT_TOKENS: Final = 512
"""Tokens whose hidden states an engine keeps for a head that has not read them (engine/batch/hidden_states.py)."""


def mtp_bytes(geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return the bytes of the caches of a multi-token prediction head, and of the hidden states that it will read.

    It guesses for one request at a time. Its layer is one of the model's, and is never quantized.
    """
    if not load.has_mtp:
        return 0
    numbers = max(
        (
            max(g.kv_heads * (g.head_dim + g.value_dim), g.latent_dim)
            for g in layer_groups(geometry)
        ),
        default=0,
    )
    kept = MTP_KEPT_TOKENS * geometry.hidden_size
    return (load.tokens * numbers + kept) * geometry.kv_element_bytes


def kept_bytes(geometry: ModelGeometry, load: ServingLoad, *, by_token: bool) -> int:
    """Return the bytes that are kept of one request from before a guess, to go back to them (engine/cache/rollback.py).

    States cannot drop a token that was guessed wrong, nor can the windows of a draft model, which reads `by_token`.
    """
    groups = layer_groups(geometry)
    if not (by_token or any(group.kind == "State" for group in groups)):
        return 0
    alone, kinds = replace(load, concurrency=1), {"State", "Sliding"}
    if load.kv_window is not None:
        kinds.add("Full")
    return sum(
        group.count * layer_cache_bytes(group, geometry, alone)
        for group in groups
        if group.kind in kinds
    )


def activation_bytes(geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return the bytes of temporary arrays: the largest layer of a prefill step, and the logits of all requests."""
    if geometry.work_bytes:
        return geometry.work_bytes
    if not geometry.hidden_size:
        # The report of an older agent, which has no widths: count the logits of a whole step.
        step = min(geometry.prefill_step, load.tokens)
        return step * geometry.vocab_size * _LOGIT_BYTES
    # One long prompt at a time, or several short ones.
    tokens = min(geometry.prefill_step * geometry.prefill_batch, load.tokens * load.concurrency)
    ffn = -(-geometry.ffn_size // load.ranks)
    width = _HIDDEN_COPIES * geometry.hidden_size + _FFN_COPIES * ffn
    rows = load.concurrency * (1 + load.draft_tokens)
    logits = _LOGIT_COPIES * rows * geometry.vocab_size * _LOGIT_BYTES
    each = width * geometry.kv_element_bytes + _score_bytes(geometry, load)
    return tokens * each + logits + _unpacked_bytes(geometry, load)


def _unpacked_bytes(geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return the bytes of one layer's keys and values, which are unpacked from a quantized cache to read prompts.

    Several prompts may be read together, and all requests have no more than `all_tokens`.
    """
    if load.kv_bits is None:
        return 0
    widths = [
        -(-group.kv_heads // load.ranks) * (group.head_dim + group.value_dim)
        for group in layer_groups(geometry)
        if group.kind == "Full"
    ]
    return max(widths, default=0) * geometry.kv_element_bytes * load.all_tokens


def _score_bytes(geometry: ModelGeometry, load: ServingLoad) -> int:
    """Return the bytes of one token's attention scores, which exist only without a fused attention kernel."""
    if geometry.is_attention_fused:
        return 0
    heads = -(-geometry.heads // load.ranks)
    lookback = max(
        (_lookback_tokens(group, geometry, load) for group in layer_groups(geometry)), default=0
    )
    return _SCORE_COPIES * heads * lookback * geometry.kv_element_bytes


def _lookback_tokens(group: LayerGroup, geometry: ModelGeometry, load: ServingLoad) -> int:
    if group.kind == "State":
        return 0
    window = load.kv_window if group.kind == "Full" else group.window
    if group.kind == "Sliding" or (group.kind == "Full" and window is not None):
        return min(load.tokens, (window or 0) + geometry.prefill_step)
    return load.tokens
