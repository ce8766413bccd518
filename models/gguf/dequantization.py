"""The numbers in the blocks of ggml's packings (`ggml-quants.c` of llama.cpp), computed with numpy."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]


def unpack_numbers(raw: bytes, packing: str, block_bytes: int) -> Floats:
    """Return the numbers of whole blocks, in their order.

    Args:
        raw: the blocks.
        packing: the name in `file_reader.PACKINGS`.
        block_bytes: the bytes of one block.

    """
    if packing == "F32":
        return np.frombuffer(raw, "<f4")
    if packing == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    if packing == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, block_bytes)
    with np.errstate(invalid="ignore"):  # the caller refuses what is not finite
        numbers: Floats = _UNPACK[packing](blocks).reshape(-1)
    return numbers


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the scale in float16 at this byte of each block."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _shifted(values: Bytes, width: int, shifts: tuple[int, ...], mask: int) -> Any:
    """Return the parts of the bytes: all lowest parts of `width` bytes first, then the next ones."""
    columns = np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    parts = (values.reshape(len(values), -1, 1, width) >> columns) & np.uint8(mask)
    return parts.reshape(len(values), -1)


def _nibbles(values: Bytes, width: int = 16) -> Any:
    return _shifted(values, width, (0, 4), 0x0F)


def _fifth_bits(blocks: Bytes, at: int) -> Any:
    """Return the highest bits of 32 numbers of five bits, in their place."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Any:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Any:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Any:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (numbers.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Any:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * numbers.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Any:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _scaled(blocks: Bytes, numbers: Any) -> Any:
    """Return 256 numbers of a K block with their eight scales and minima of six bits, which are 12 bytes at byte 4."""
    scales, minima, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = np.hstack([scales & 0x3F, (high & 0x0F) | ((scales >> 2) & 0x30)])
    minimum = np.hstack([minima & 0x3F, (high >> 4) | ((minima >> 2) & 0x30)])
    scale = (_half(blocks, 0) * scale.astype(np.float32))[:, :, None]
    minimum = (_half(blocks, 2) * minimum.astype(np.float32))[:, :, None]
    return scale * numbers.reshape(-1, 8, 32).astype(np.float32) - minimum


def _q4_k(blocks: Bytes) -> Any:
    return _scaled(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Any:
    high = _shifted(blocks[:, 16:48], 32, tuple(range(8)), 1)
    return _scaled(blocks, _nibbles(blocks[:, 48:], 32) | (high << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Any:
    low = _nibbles(blocks[:, :128], 64)
    numbers = low | (_shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << np.uint8(4))
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scale[:, :, None] * (numbers.reshape(-1, 16, 16).astype(np.float32) - 32)


_UNPACK: Final[dict[str, Callable[[Bytes], Any]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
