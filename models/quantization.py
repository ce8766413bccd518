"""Quantization of a stored model: which bits are supported, what the result is called, and what the conversion needs.

The conversion is the engine's (engine/quantize/); this module only computes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, ConfigDict

from models import inspection_process, model_files
from models.hub.model_hub import check_repo
from models.model_files import MAX_CONFIG_BYTES, ModelFacts, ModelUnusableError
from schemas.deployment import FLEET_ORGANISATION
from schemas.wire.stored_models import (
    QuantizationMode,
    QuantizationQuality,
    QuantizationRecipe,
    QuantizationScheme,
)


@dataclass(frozen=True, slots=True)
class _ModeLimits:
    """Bits and group sizes of a mode, for which mlx has kernels on Metal and on the CPU."""

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    default_bits: int
    default_group_size: int


# The defaults are those of `quantize_model` in mlx_lm/utils.py.
MODES: Final[dict[QuantizationMode, _ModeLimits]] = {
    "affine": _ModeLimits((2, 3, 4, 5, 6, 8), (32, 64, 128), 4, 64),
    "mxfp4": _ModeLimits((4,), (32,), 4, 32),
    "nvfp4": _ModeLimits((4,), (16,), 4, 16),
    "mxfp8": _ModeLimits((8,), (32,), 8, 32),
}
RECIPES: Final = get_args(QuantizationRecipe)
"""Recipes of mixed bits in mlx_lm/convert.py, named after the bits of most layers and of the most sensitive ones."""
ORIGIN_FILE: Final = "quantization_origin.json"
"""The file of the result that says what it was made of; engines ignore it."""
QUALITY_FILE: Final = "quantization_quality.json"
"""The file of the result that says how near it is to its original."""
QUALITY_MODEL_BYTES: Final = 3 << 30
"""Memory beside the weights while a model reads the text: logits, activations, and the process."""

# mlx_lm.utils.MAX_FILE_SIZE_GB: the converter computes one weight file of the result at a time.
_SHARD_BYTES: Final = 5 << 30
# Python, mlx, the tokenizer, and what the allocator keeps.
_PROCESS_BYTES: Final = 1 << 30


class QuantizationOrigin(BaseModel):
    """The source and the parameters of a result."""

    model_config = ConfigDict(frozen=True)
    repo: str
    commit: str
    scheme: QuantizationScheme


def result_repo(origin: QuantizationOrigin, name: str = "") -> str:
    """Return the repository of the result: `fleet/` and a name, by default that of the source with commit and scheme.

    Raises:
        ValueError: the name cannot be that of a repository.

    """
    scheme = origin.scheme
    packing = f"{scheme.quant_predicate or f'{scheme.bits}bit'}-g{scheme.group_size}"
    packing = packing if scheme.mode == "affine" else scheme.mode
    default = f"{origin.repo.partition('/')[2]}-{origin.commit[:12]}-{packing}"
    repo = f"{FLEET_ORGANISATION}/{name or default}"
    try:
        check_repo(repo)
    except ValueError as error:
        raise ValueError(
            f"{repo[len(FLEET_ORGANISATION) + 1 :]!r} is no name of a model; give one with --name: letters, digits, "
            "'-', '_' and '.', at most 96"
        ) from error
    return repo


def choose_scheme(
    mode: QuantizationMode,
    bits: int | None = None,
    group_size: int | None = None,
    quant_predicate: QuantizationRecipe | None = None,
) -> QuantizationScheme:
    """Return the scheme, with the mode's own bits and group size where none are given.

    Raises:
        ValueError: mlx has no kernels for it, or the values exclude each other.

    """
    limits = MODES[mode]
    if quant_predicate is not None and (mode != "affine" or bits is not None):
        what = "bits" if mode == "affine" else f"mode {mode}"
        raise ValueError(f"{quant_predicate} chooses mode and bits itself; leave {what} out")
    if quant_predicate is not None:
        bits = int(quant_predicate.split("_")[1])
    bits = limits.default_bits if bits is None else bits
    group_size = limits.default_group_size if group_size is None else group_size
    for what, value, allowed in (
        ("bits", bits, limits.bits),
        ("group size", group_size, limits.group_sizes),
    ):
        if value not in allowed:
            words = ", ".join(map(str, allowed))
            choice = f"choose one of {words}" if len(allowed) > 1 else f"it is {words}"
            where = "" if mode == "affine" else f" with mode {mode}"
            raise ValueError(f"{what} {value} is not supported{where}; {choice}")
    return QuantizationScheme(
        mode=mode, bits=bits, group_size=group_size, quant_predicate=quant_predicate
    )


def output_bytes(folder: Path, facts: ModelFacts, scheme: QuantizationScheme) -> int:
    """Return about how many bytes the result has: weights, what each group has beside them, and the small files."""
    weights, group_size = facts.weights, scheme.group_size
    # A scale and a bias in the type of the weights, or a scale of one byte.
    beside = 2 * (16 if weights.half_bytes else 32) if scheme.mode == "affine" else 8
    more_bits = 0
    if scheme.quant_predicate is not None:
        more_bits = int(scheme.quant_predicate.split("_")[2]) - scheme.bits
    # A recipe gives more bits to the head, and to values and down projections of half of the layers: 15 to 20 % of the
    # weights of large models, and a quarter of small ones.
    packed = weights.parameters * ((scheme.bits + more_bits / 4) * group_size + beside)
    packed = round(packed / (8 * group_size))
    other = sum(
        path.stat().st_size
        for path in folder.iterdir()
        if path.is_file() and path.suffix != ".safetensors"
    )
    # Layers whose width the group size does not divide stay as they are.
    return (min(packed, weights.total_bytes) or weights.total_bytes) + other


def needed_memory(folder: Path, facts: ModelFacts, scheme: QuantizationScheme) -> int:
    """Return the bytes of memory for the conversion: the source's part of one weight file of the result, and the process.

    A file of the result may have the weights with the fewest bits only, so its part of the source is the largest.
    """
    source = facts.weight_bytes
    least = output_bytes(folder, facts, scheme.model_copy(update={"quant_predicate": None}))
    return _PROCESS_BYTES + min(source, source * _SHARD_BYTES // max(least, 1))


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


def read_quality(folder: Path) -> QuantizationQuality | None:
    """Return how near a result is to its original; None if its folder does not say."""
    try:
        return model_files.parse_json_file(QuantizationQuality, folder / QUALITY_FILE)
    except (ModelUnusableError, OSError):
        return None


def read_origin(folder: Path) -> QuantizationOrigin | None:
    """Return what the model of a folder was made of; None if it does not say."""
    try:
        return model_files.parse_json_file(QuantizationOrigin, folder / ORIGIN_FILE)
    except (ModelUnusableError, OSError):
        return None
