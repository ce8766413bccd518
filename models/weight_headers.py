"""The headers of a model's weight files with its config.json: everything of a model but its bytes. Must not import mlx.

mlx-lm decides by names, types and shapes of tensors how a model is built and split. With the headers it decides on a
Mac without the files, or with some of them, as it does on one that has them all.
"""

import base64
import binascii
import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.model_files import MAX_WEIGHT_FILES, TensorHeader
from schemas.model_snapshot import MAX_HEADERS_CHARACTERS

# 90,000 tensors of experts take 330,000 characters; a converted model of 3,000 tensors takes 10,000.
_MAX_CHARACTERS: Final = MAX_HEADERS_CHARACTERS
# JSON of the headers before it is packed.
_MAX_JSON_BYTES: Final = 32 << 20


class TensorShape(BaseModel):
    """The type and shape of a tensor, and its bytes in the file."""

    model_config = ConfigDict(frozen=True)
    dtype: str
    shape: tuple[int, ...]
    size: int = Field(ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHeaders:
    """The tensors of a model by weight file, and its config.json."""

    config: str
    """The text of config.json."""
    files: Mapping[str, Mapping[str, TensorShape]]
    """Tensors by name, by the file that has them."""

    @property
    def weight_map(self) -> dict[str, str]:
        """Return the file of each tensor, as `model.safetensors.index.json` names it."""
        return {name: path for path, tensors in self.files.items() for name in tensors}


class _PackedHeaders(BaseModel):
    config: str
    files: dict[str, dict[str, tuple[str, tuple[int, ...], int]]] = Field(
        max_length=MAX_WEIGHT_FILES
    )


def make_headers(
    config: str, files: Mapping[str, Mapping[str, TensorHeader]]
) -> WeightHeaders | None:
    """Return the headers of weight files; None if one has a tensor without a shape."""
    found: dict[str, dict[str, TensorShape]] = {}
    for path, tensors in files.items():
        found[path] = {}
        for name, tensor in tensors.items():
            if tensor.shape is None:
                return None
            found[path][name] = TensorShape(
                dtype=tensor.dtype, shape=tensor.shape, size=tensor.size
            )
    return WeightHeaders(config=config, files=found)


def pack(headers: WeightHeaders) -> str:
    """Return the headers as compressed text; "" if they are too long to be stored."""
    files = {
        path: {name: (one.dtype, one.shape, one.size) for name, one in sorted(tensors.items())}
        for path, tensors in sorted(headers.files.items())
    }
    raw = json.dumps({"config": headers.config, "files": files}, separators=(",", ":")).encode()
    if len(raw) > _MAX_JSON_BYTES:
        return ""
    text = base64.b64encode(zlib.compress(raw, 9)).decode()
    return text if len(text) <= _MAX_CHARACTERS else ""


def unpack(text: str) -> WeightHeaders:
    """Return the headers of a packed text.

    Raises:
        ValueError: it is no packed form, or too long.

    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"packed headers have {len(text)} characters; at most {_MAX_CHARACTERS}")
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(base64.b64decode(text, validate=True), _MAX_JSON_BYTES)
        if reader.unconsumed_tail or not reader.eof:
            raise ValueError("packed headers are cut short, or too long")
        headers = _PackedHeaders.model_validate_json(raw)
    except (zlib.error, binascii.Error, ValidationError) as error:
        raise ValueError(f"packed headers cannot be read: {str(error).splitlines()[0]}") from error
    return WeightHeaders(
        config=headers.config,
        files={
            path: {
                name: TensorShape(dtype=dtype, shape=shape, size=size)
                for name, (dtype, shape, size) in tensors.items()
            }
            for path, tensors in headers.files.items()
        },
    )


def write_skeleton(path: Path, tensors: Mapping[str, TensorShape]) -> None:
    """Write a safetensors file with these tensors and without their bytes, for a library that reads weights lazily.

    All tensors lie upon each other in a hole of the file as large as the largest one.

    Raises:
        OSError: the disk failed, or its file system has no holes and no room.

    """
    header = {
        name: {"dtype": one.dtype, "shape": one.shape, "data_offsets": (0, one.size)}
        for name, one in tensors.items()
    }
    raw = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(file.tell() + max((tensor.size for tensor in tensors.values()), default=0))


def cut_skeleton(file: BinaryIO) -> None:
    """Remove the hole of a skeleton that a library has opened: from now on, reading a tensor of it is an error."""
    os.ftruncate(file.fileno(), 0)
