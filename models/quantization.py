"""Quantization of a stored model: which bits are supported, what the result is called, and what the conversion needs.

The conversion is the engine's (engine/quantize/); this module only computes.
"""

from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from models import inspection_process, model_files
from models.hub.model_hub import check_repo
from models.model_files import MAX_CONFIG_BYTES, ModelFacts, ModelUnusableError
from schemas.deployment import FLEET_ORGANISATION

BITS: Final = (2, 3, 4, 5, 6, 8)
GROUP_SIZES: Final = (32, 64, 128)
"""Bits and group sizes of mlx's affine mode that its kernels have on Metal and on the CPU."""
ORIGIN_FILE: Final = "quantization_origin.json"
"""The file of the result that says what it was made of; engines ignore it."""

# mlx_lm.utils.MAX_FILE_SIZE_GB: the converter computes one weight file of the result at a time.
_SHARD_BYTES: Final = 5 << 30
# Python, mlx, the tokenizer, and what the allocator keeps.
_PROCESS_BYTES: Final = 1 << 30


class QuantizationOrigin(BaseModel):
    """The source and the parameters of a result."""

    model_config = ConfigDict(frozen=True)
    repo: str
    commit: str
    bits: int
    group_size: int


def result_repo(origin: QuantizationOrigin, name: str = "") -> str:
    """Return the repository of the result: `fleet/` and a name, by default that of the source with commit, bits and group.

    Raises:
        ValueError: the name cannot be that of a repository.

    """
    default = f"{origin.repo.partition('/')[2]}-{origin.commit[:12]}-{origin.bits}bit-g{origin.group_size}"
    repo = f"{FLEET_ORGANISATION}/{name or default}"
    try:
        check_repo(repo)
    except ValueError as error:
        raise ValueError(
            f"{repo[len(FLEET_ORGANISATION) + 1 :]!r} is no name of a model; give one with --name: letters, digits, "
            "'-', '_' and '.', at most 96"
        ) from error
    return repo


def check_parameters(bits: int, group_size: int) -> None:
    """Refuse bits and group sizes that mlx has no kernels for. Raises ValueError."""
    for what, value, allowed in (("bits", bits, BITS), ("group size", group_size, GROUP_SIZES)):
        if value not in allowed:
            words = ", ".join(map(str, allowed))
            raise ValueError(f"{what} {value} is not supported; choose one of {words}")


def output_bytes(folder: Path, facts: ModelFacts, *, bits: int, group_size: int) -> int:
    """Return about how many bytes the result has: weights with a scale and a bias for each group, and the small files."""
    weights = facts.weights
    scale_bits = 16 if weights.half_bytes else 32
    packed = weights.parameters * (bits * group_size + 2 * scale_bits) // (8 * group_size)
    other = sum(
        path.stat().st_size
        for path in folder.iterdir()
        if path.is_file() and path.suffix != ".safetensors"
    )
    # Layers whose width the group size does not divide stay as they are.
    return (min(packed, weights.total_bytes) or weights.total_bytes) + other


def needed_memory(facts: ModelFacts, result_bytes: int) -> int:
    """Return the bytes of memory for the conversion: the source's part of one weight file of the result, and the process."""
    source = facts.weight_bytes
    return _PROCESS_BYTES + min(source, source * _SHARD_BYTES // max(result_bytes, 1))


class _Quantizations(BaseModel):
    """The fields of config.json that say that weights are packed already, by mlx or by others."""

    quantization: Any = None
    quantization_config: Any = None


def inspect_source(folder: Path) -> ModelFacts:
    """Return the facts of a model that can be quantized.

    Raises:
        ModelUnusableError: it is damaged, or quantized already.

    """
    facts = inspection_process.inspect_model(folder)
    config = model_files.parse_json_file(
        _Quantizations, folder / "config.json", limit_bytes=MAX_CONFIG_BYTES
    )
    found = config.quantization or config.quantization_config
    if found:
        bits = f" to {found['bits']} bits" if isinstance(found, dict) and "bits" in found else ""
        raise ModelUnusableError(
            f"{folder.name} is quantized already{bits}: quantize the model that it was made of, as a second time loses "
            "more than bits"
        )
    return facts


def read_origin(folder: Path) -> QuantizationOrigin | None:
    """Return what the model of a folder was made of; None if it does not say."""
    try:
        return model_files.parse_json_file(QuantizationOrigin, folder / ORIGIN_FILE)
    except (ModelUnusableError, OSError):
        return None
