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


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How an engine is used, and over how many ranks its model is split."""

    context_length: int
    concurrency: int
    ranks: int = 1

    @property
    def tokens(self) -> int:
        """Return what one request's cache holds at most."""
        return -(-self.context_length // _KV_STEP) * _KV_STEP


def cache_bytes(geometry: ModelGeometry, use: Use) -> int:
    """Return what the caches of all requests hold together, on one rank."""
    return sum(group.count * _layer_bytes(group, geometry, use) for group in _groups(geometry))


def _groups(geometry: ModelGeometry) -> tuple[LayerGroup, ...]:
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


def _layer_bytes(group: LayerGroup, geometry: ModelGeometry, use: Use) -> int:
    heads = -(-group.kv_heads // use.ranks)
    per_token = heads * (group.head_dim + group.value_dim) * geometry.kv_element_bytes
    match group.kind:
        case "Full":
            return per_token * use.tokens * use.concurrency
        case "Sliding":
            return per_token * _window_tokens(geometry, group.window, use)
        case "Latent":
            # Compressed vectors belong to no head, so every rank keeps them all.
            return group.latent_dim * geometry.kv_element_bytes * use.tokens * use.concurrency
        case "State":
            return -(-group.state_bytes // use.ranks) * use.concurrency


def _window_tokens(geometry: ModelGeometry, window: int, use: Use) -> int:
    """Return the tokens that a sliding layer keeps for all requests.

    While a prompt is prefilled the layer holds a whole step more: RotatingKVCache drops what left the
    window only afterwards.
    """
    kept = min(use.tokens, window)
    step = min(geometry.prefill_step, use.tokens - kept)
    return kept * use.concurrency + step * min(use.concurrency, geometry.prefill_batch)


def activation_bytes(geometry: ModelGeometry, use: Use) -> int:
    """Return what is held for a moment: the worst layer of a prefill step, and the logits of all requests."""
    step = min(geometry.prefill_step, use.tokens)
    if (
        not geometry.hidden_size
    ):  # a report of an agent that did not say: the logits of a whole step
        return step * geometry.vocab_size * _LOGIT_BYTES
    tokens = step * min(use.concurrency, geometry.prefill_batch)
    ffn = -(-geometry.ffn_size // use.ranks)
    width = _HIDDEN_COPIES * geometry.hidden_size + _FFN_COPIES * ffn
    logits = _LOGIT_COPIES * use.concurrency * geometry.vocab_size * _LOGIT_BYTES
    return tokens * width * geometry.kv_element_bytes + _score_bytes(geometry, use, tokens) + logits


def _score_bytes(geometry: ModelGeometry, use: Use, tokens: int) -> int:
    """Return what attention scores take where they are written out: of every token to all it looks back at."""
    if geometry.is_attention_fused:
        return 0
    heads = -(-geometry.heads // use.ranks)
    back = max((_lookback(group, geometry, use) for group in _groups(geometry)), default=0)
    return _SCORE_COPIES * heads * tokens * back * geometry.kv_element_bytes


def _lookback(group: LayerGroup, geometry: ModelGeometry, use: Use) -> int:
    if group.kind == "State":
        return 0
    if group.kind == "Sliding":
        return min(use.tokens, group.window + geometry.prefill_step)
    return use.tokens
