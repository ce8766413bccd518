"""Files of model folders and adapters for tests."""

import json
import struct
from typing import Any

from hypothesis import strategies as st

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}

TENSORS = {"a": ("F32", 0, 400), "b": ("BF16", 400, 600)}


def safetensors(tensors: dict[str, tuple[str, int, int]] = TENSORS, *, missing: int = 0) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    for name, (dtype, begin, end) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    size = max((end for _, _, end in tensors.values()), default=0)
    return struct.pack("<Q", len(text)) + text + bytes(max(0, size - missing))


json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)

numbers = json_trees | st.integers(-1, 2**70)

headers = st.dictionaries(
    st.text(max_size=3),
    json_trees
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16"]) | json_trees,
            "data_offsets": st.lists(st.integers(-5, 50), max_size=3) | json_trees,
        }
    ),
    max_size=3,
).map(lambda tree: json.dumps(tree).encode())

configs = st.binary(max_size=50) | st.fixed_dictionaries(
    {"model_type": st.just("x") | json_trees},
    optional=dict.fromkeys(CONFIG.keys() - {"model_type"}, numbers),
).map(lambda tree: json.dumps(tree).encode())

files = st.binary(max_size=60) | st.builds(
    lambda header, slack, data: struct.pack("<Q", len(header) + slack) + header + data,
    headers,
    st.integers(0, 3),
    st.binary(max_size=50),
)

ADAPTER_CONFIG: dict[str, Any] = {
    "fine_tune_type": "lora",
    "num_layers": 2,
    "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0},
    "model": "somewhere",
}

ADAPTER_TENSORS = {
    "model.layers.0.self_attn.q_proj.lora_a": ("F32", 0, 400),
    "model.layers.0.self_attn.q_proj.lora_b": ("BF16", 400, 600),
}
