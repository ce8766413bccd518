"""What grows with the requests an engine works on: caches, and what a prompt's prefill needs for a moment. Pure."""

from dataclasses import dataclass

from schemas.node import LayerGroup, ModelGeometry

# mlx-lm grows KV caches in steps of 256 tokens (mlx_lm/models/cache.py).
_KV_STEP = 256
_LOGIT_BYTES = 4
# Copies of a token's numbers that live at once while a layer is worked on: measured with BatchGenerator on
# models of random weights (tests/nodeagent/test_geometry_mlx.py holds it).
_HIDDEN_COPIES = 6
_FFN_COPIES = 4
_SCORE_COPIES = 2
_LOGIT_COPIES = 2
# mlx packs numbers of a quantized cache together under one scale and one bias: 64 of them, or 32 where 64 do not
# divide a head (nodeagent/engine/cache/packed.py).
_GROUP, PACKED_TOGETHER = 64, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
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
        return -(-self.context_length // _KV_STEP) * _KV_STEP


def cache_bytes(geometry: ModelGeometry, use: Use) -> int:
    """Return what the caches of all requests hold together, on one rank."""
    return sum(group.count * layer_bytes(group, geometry, use) for group in groups_of(geometry))


def groups_of(geometry: ModelGeometry) -> tuple[LayerGroup, ...]:
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


def layer_bytes(group: LayerGroup, geometry: ModelGeometry, use: Use) -> int:
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
    group = _GROUP if numbers % _GROUP == 0 else PACKED_TOGETHER
    return -(-numbers * bits // 32) * 4 + 2 * -(-numbers // group) * element_bytes


def _window_tokens(geometry: ModelGeometry, window: int, use: Use) -> int:
    """Return the tokens that a sliding layer keeps for all requests.

    While a prompt is prefilled the layer holds a whole step more: RotatingKVCache drops what left the
    window only afterwards.
    """
    kept = min(use.tokens, window)
    read = min(
        geometry.prefill_step * geometry.prefill_batch, (use.tokens - kept) * use.concurrency
    )
    return kept * use.concurrency + read


def activation_bytes(geometry: ModelGeometry, use: Use) -> int:
    """Return what is held for a moment: the worst layer of a prefill step, and the logits of all requests."""
    if not geometry.hidden_size:
        # A report of an agent that did not say: the logits of a whole step.
        step = min(geometry.prefill_step, use.tokens)
        return step * geometry.vocab_size * _LOGIT_BYTES
    # One long prompt at a time, or several short ones.
    tokens = min(geometry.prefill_step * geometry.prefill_batch, use.tokens * use.concurrency)
    ffn = -(-geometry.ffn_size // use.ranks)
    width = _HIDDEN_COPIES * geometry.hidden_size + _FFN_COPIES * ffn
    rows = use.concurrency * use.decoded_at_once
    logits = _LOGIT_COPIES * rows * geometry.vocab_size * _LOGIT_BYTES
    return tokens * width * geometry.kv_element_bytes + _score_bytes(geometry, use, tokens) + logits


def _score_bytes(geometry: ModelGeometry, use: Use, tokens: int) -> int:
    """Return what attention scores take where they are written out: of every token to all it looks back at."""
    # mlx-lm attends to a quantized cache without the fused kernel (quantized_scaled_dot_product_attention).
    if geometry.is_attention_fused and use.kv_bits is None:
        return 0
    heads = -(-geometry.heads // use.ranks)
    back = max((_lookback(group, geometry, use) for group in groups_of(geometry)), default=0)
    return _SCORE_COPIES * heads * tokens * back * geometry.kv_element_bytes


def _lookback(group: LayerGroup, geometry: ModelGeometry, use: Use) -> int:
    if group.kind == "State":
        return 0
    window = use.kv_window if group.kind == "Full" else group.window
    if group.kind == "Sliding" or (group.kind == "Full" and window is not None):
        return min(use.tokens, (window or 0) + geometry.prefill_step)
    return use.tokens
