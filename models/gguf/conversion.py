"""Writes the MLX model of a GGUF file: a folder with config, tokenizer and weights in 16 or 32 bits."""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from models.gguf import architectures, file_reader, tokenizer_files
from models.gguf.architectures import ModelPlan, OutputTensor
from models.gguf.dequantization import Floats, unpack_numbers
from models.gguf.file_reader import GgufFile, GgufRefusedError
from models.safetensors_file import NewTensor, index_of, split_tensors, write_file

_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
# Numbers that are computed at a time: a tenth of a GB with what numpy has beside them. 256 is the largest block.
_PIECE_NUMBERS: Final = 1 << 21


def result_bytes(path: Path) -> int:
    """Return the bytes of the weights that the result will have, and of the tokenizer at most.

    Raises:
        GgufRefusedError: the file cannot be read as a model.
        OSError: the file cannot be read.

    """
    file = file_reader.read_header(path)
    plan = architectures.plan_model(file)
    first = min((tensor.start for tensor in file.tensors.values()), default=0)
    weights = sum(math.prod(tensor.source.shape) for tensor in plan.tensors)
    return (
        weights * _BYTES[plan.dtype] + 4 * first
    )  # a merge is in the file once, and quoted in the result


def convert(path: Path, into: Path) -> None:
    """Write the folder `into`, which must not exist. Reads each weight once, in pieces.

    Raises:
        GgufRefusedError: the file cannot be read as a model.
        OSError: the disk is full or failed.

    """
    file = file_reader.read_header(path)
    plan = architectures.plan_model(file)
    tokenizer = tokenizer_files.read_tokenizer(file)
    if tokenizer.size > plan.config["vocab_size"]:
        raise GgufRefusedError(
            f"{path} has {tokenizer.size} tokens, and weights for {plan.config['vocab_size']}: it is damaged"
        )
    into.mkdir()
    length = plan.config["max_position_embeddings"]
    _write(into / "config.json", {**plan.config, **tokenizer.token_ids})
    _write(into / "tokenizer.json", tokenizer.tokenizer)
    _write(into / "tokenizer_config.json", {**tokenizer.config, "model_max_length": length})
    parts = split_tensors([_new_tensor(file, plan, tensor) for tensor in plan.tensors])
    for name, tensors in parts.items():
        write_file(into / name, tensors, f"gguf:{path.name}", lambda _: None)
    _write(into / "model.safetensors.index.json", index_of(parts))


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def _new_tensor(file: GgufFile, plan: ModelPlan, tensor: OutputTensor) -> NewTensor:
    return NewTensor(
        name=tensor.name,
        dtype=plan.dtype,
        shape=tensor.source.shape,
        size=math.prod(tensor.source.shape) * _BYTES[plan.dtype],
        read=partial(_read, file.path, tensor, plan.dtype),
    )


def _read(path: Path, tensor: OutputTensor, dtype: str) -> Iterator[bytes]:
    """Yield the numbers of a tensor as they are in the result. Raises GgufRefusedError: one is not finite."""
    source = tensor.source
    packing, numbers = source.packing, math.prod(source.shape)
    heads = tensor.swapped_heads
    piece = numbers // heads if heads else _PIECE_NUMBERS
    if piece > _PIECE_NUMBERS * 8 or (heads and piece % packing.numbers):
        raise GgufRefusedError(f"{path}: a head of its tensor {source.name} has {piece} numbers")
    with path.open("rb") as file:
        file.seek(source.start)
        for start in range(0, numbers, piece):
            count = min(piece, numbers - start)
            raw = file.read(count // packing.numbers * packing.bytes)
            if len(raw) != count // packing.numbers * packing.bytes:
                raise GgufRefusedError(f"{path} became shorter while it was read")
            values = unpack_numbers(raw, packing.name, packing.bytes)
            if heads:
                values = _usual_order(values, source.shape[0] // heads)
            yield _pack(
                values + np.float32(tensor.added), dtype, f"{path}: its tensor {source.name}"
            )


def _usual_order(values: Floats, rows: int) -> Floats:
    """Undo llama.cpp's order of the rows of one head: pairs that turn together are neighbours there."""
    return values.reshape(rows // 2, 2, -1).swapaxes(0, 1).reshape(-1)


def _pack(values: Floats, dtype: str, what: str) -> bytes:
    with np.errstate(over="ignore"):
        packed: Any = values.astype("<f2") if dtype == "F16" else values
    if not np.isfinite(packed).all():
        raise GgufRefusedError(f"{what} has numbers that are not finite in {dtype}: it is damaged")
    if dtype == "BF16":  # to the nearest, and of two to the even one
        bits = values.view(np.uint32)
        packed = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return bytes(packed.tobytes())
