"""GGUF files of model folders, written by the package `gguf` of llama.cpp; nothing of mlx is imported."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

Arrays = Mapping[str, npt.NDArray[np.float32]]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def read_weights(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of a folder with one file in float32."""
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    arrays = {}
    for name, tensor in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + at for at in tensor["data_offsets"])
            arrays[name] = np.frombuffer(raw[start:end], "<f4").reshape(tensor["shape"])
    return arrays


def write_gguf(
    path: Path, folder: Path, packing: str = "F32", arrays: Arrays | None = None, **metadata: Any
) -> Path:
    """Write a folder in float32 as a GGUF file, as llama.cpp converts those of Hugging Face.

    Args:
        path: the file.
        folder: the model.
        packing: the type of tensors with two dimensions.
        arrays: the weights, if not those of the folder.
        metadata: keys that are changed, with "__" for "."; None leaves one out.

    """
    config = json.loads((folder / "config.json").read_bytes())
    kind = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    _add_sizes(writer, config)
    _add_tokenizer(writer, folder)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        writer.kv_data[0].pop(name, None)
        if value is not None:
            is_text = isinstance(value, str)
            (writer.add_string if is_text else writer.add_uint32)(name, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, array in (read_weights(folder) if arrays is None else arrays).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None
        part = name.split(".")[-2]
        values = array
        if config["model_type"] == "llama" and part in heads:
            values = _permuted(array, heads[part])
        if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            values = array + 1
        kind_of = GGMLQuantizationType[packing if values.ndim == 2 else "F32"]
        writer.add_tensor(target, quants.quantize(values, kind_of), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permuted(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Return the rows in llama.cpp's order: `permute` of its converter."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    added = {token["content"]: token["special"] for token in tokenizer["added_tokens"]}
    ids = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    control, user = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    kinds = [control if added.get(token) else user if token in added else 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_pad_token_id(ids[config["pad_token"]])
    writer.add_chat_template(config["chat_template"])
