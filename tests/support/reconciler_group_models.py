"""Models as agents report them, for tests of groups."""

from schemas.node import LayerGroup, ModelGeometry, SplitOptions

# As SmolLM2-135M's agent reports it.
SMOL = ModelGeometry(
    model_type="llama",
    weights_bytes=538_060_032,
    layers=30,
    kv_heads=3,
    head_dim=64,
    kv_element_bytes=4,
    vocab_size=49_152,
    replicated_bytes=113_386_752,
    heads=9,
    hidden_size=576,
    ffn_size=1536,
    splitting=SplitOptions(
        tensor=(3,), tensor_bytes=(254_944_512,), basis="llama, 9 heads, 3 KV heads"
    ),
)

MIXED_LAYERS = (0, 0, 0, 1) * 3


def piped(*, layers: tuple[int, ...] = (10, 20, 30, 40), rest: int = 7) -> ModelGeometry:
    """Return a model with layers of these sizes, which can be split by layers."""
    return ModelGeometry(
        model_type="qwen2",
        weights_bytes=sum(layers) + rest,
        layers=len(layers),
        kv_heads=2,
        head_dim=16,
        kv_element_bytes=2,
        vocab_size=512,
        heads=4,
        hidden_size=64,
        ffn_size=128,
        splitting=SplitOptions(
            tensor=(2,),
            tensor_bytes=((sum(layers) + rest) // 2 + rest,),
            is_pipelined=True,
            layer_bytes=layers,
            rest_bytes=rest,
            layer_groups=(0,) * len(layers),
            basis="qwen2, 4 heads, 2 KV heads",
        ),
    )


def mixed(*, is_order_known: bool = True) -> ModelGeometry:
    """Return a model of which every fourth layer sees everything, and the others keep a small state."""
    state = LayerGroup(kind="State", count=9, state_bytes=1000)
    full = LayerGroup(kind="Full", count=3, kv_heads=2, head_dim=16, value_dim=16)
    geometry = piped(layers=(100,) * 12)
    assert geometry.splitting is not None
    order = MIXED_LAYERS if is_order_known else ()
    splitting = geometry.splitting.model_copy(update={"layer_groups": order})
    return geometry.model_copy(update={"groups": (state, full), "splitting": splitting})
