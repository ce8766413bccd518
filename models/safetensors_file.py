"""Writes safetensors files from pieces, so that no tensor is in memory as a whole."""

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.model_files import LEAD_BYTES

_FILE_BYTES: Final = 5 << 30
"""Bytes of one file, as mlx-lm makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    """One tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Its bytes."""
    read: Callable[[], Iterator[bytes]]
    """Returns its bytes in pieces."""


def split_tensors(tensors: Sequence[NewTensor]) -> dict[str, list[NewTensor]]:
    """Return the tensors of each file, by its name."""
    parts: list[list[NewTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if parts[-1] and filled + tensor.size > _FILE_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": part
        for number, part in enumerate(parts, 1)
    }


def write_file(
    path: Path, tensors: Iterable[NewTensor], source: str, on_bytes: Callable[[bytes], None]
) -> None:
    """Write one file, and flush it to the disk; `on_bytes` gets its bytes in their order.

    Raises:
        FileExistsError: the file exists.
        OSError: the disk is full or failed; the errors of `read` mean what they say.

    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx", "source": source}}
    at = 0
    listed = tuple(tensors)
    for tensor in listed:
        place = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
        header[tensor.name] = {**place, "data_offsets": [at, at + tensor.size]}
        at += tensor.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as file:
        for piece in (struct.pack("<Q", len(raw)), raw):
            on_bytes(piece)
            file.write(piece)
        for tensor in listed:
            for piece in tensor.read():
                on_bytes(piece)
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        if file.tell() != LEAD_BYTES + len(raw) + at:
            raise OSError(f"{path} has {file.tell()} bytes instead of {LEAD_BYTES + len(raw) + at}")


def index_of(parts: Mapping[str, Sequence[NewTensor]]) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json, which mlx-lm reads when it splits a model."""
    return {
        "metadata": {"total_size": sum(entry.size for part in parts.values() for entry in part)},
        "weight_map": {entry.name: name for name, part in parts.items() for entry in part},
    }
