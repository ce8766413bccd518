"""Inspection of a model folder: config.json and the headers of its safetensors files. Must not import mlx.

Only small JSON files and headers are read, so an agent can inspect every deployed model, and an engine can refuse a
broken one before it spends seconds on imports.
"""

import contextlib
import difflib
import itertools
import math
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator

from models import cache_rules, encoder_shape, mtp_layout, speech_shape
from models.cache_rules import NotUnderstoodError
from models.encoder_shape import EncoderShape
from models.hf_config import ModelConfig, TextConfig, VisionConfig
from models.speech_shape import SpeechShape
from schemas.node import ModelGeometry, VisionTower

_HALF_PRECISION: Final = ("F16", "BF16")
# Weights that every rank of a split model keeps whole: `shard()` and PipelineMixin skip them (mlx-lm 0.32.2).
_REPLICATED_NAMES: Final = re.compile(
    r"embed|wte\b|lm_head|norm|router|\.gate\.|e_score_correction|\bln_"
)
# Routed experts as mlx-lm (`switch_mlp.`, `switch_glu.`) and transformers (`experts.12.`, `experts.`) name them.
_EXPERT_NAMES: Final = re.compile(r"(?:^|\.)(?:switch_mlp|switch_glu|experts)\.")
# Tables of which a token reads one row.
_TABLE_NAMES: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens|embed_tokens_per_layer|wte|embeddings)\."
)
_PER_LAYER_TABLE: Final = "embed_tokens_per_layer."
_DEFAULT_GROUP_SIZE: Final = 64  # mlx's default for quantized weights

# More dimensions than tensors of models have; the exact product of two million numbers takes minutes.
_Shape = Annotated[tuple[Annotated[int, Field(ge=0, le=2**48)], ...], Field(max_length=8)]


class TensorHeader(BaseModel):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: _Shape | None = None
    data_offsets: tuple[int, int]

    @field_validator("data_offsets")
    @classmethod
    def _ordered(cls, offsets: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= offsets[0] <= offsets[1]:
            raise ValueError("offsets must ascend")
        return offsets

    @property
    def size(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class PartBytes(NamedTuple):
    """Bytes of a part of a model's weights."""

    total: int = 0
    half: int = 0
    """The part of it that is float16 or bfloat16."""


_NO_BYTES: Final = PartBytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTotals:
    """Sums over the tensors of a model or an adapter."""

    total_bytes: int
    half_bytes: int
    """The part that is float16 or bfloat16."""
    replicated_bytes: int
    """The part that every rank of a split model keeps whole."""
    replicated_half_bytes: int
    parameters: int
    """0 if a header has no shapes."""
    has_mtp_head: bool | None = None
    """True if there is a head for multi-token prediction; None if it is not known."""
    experts: PartBytes = _NO_BYTES
    """Routed experts, of which a token reads a few."""
    looked_up: PartBytes = _NO_BYTES
    """Tables of which a token reads one row."""


def is_replicated(name: str) -> bool:
    """Return whether every rank of a split model keeps the tensor whole."""
    return _REPLICATED_NAMES.search(name) is not None


def is_expert(name: str) -> bool:
    """Return whether the tensor belongs to routed experts; those that every token reads have other names."""
    return _EXPERT_NAMES.search(name) is not None


def is_looked_up(name: str, *, has_head: bool) -> bool:
    """Return whether a token reads one row of the tensor; without a head of its own the embedding is the head, too."""
    return _TABLE_NAMES.search(name) is not None and (has_head or _PER_LAYER_TABLE in name)


def total_weights(tensors: Mapping[str, TensorHeader], *, group_size: int | None) -> WeightTotals:
    """Return the sums over tensors by name; `group_size` is the quantization's, None for mlx's default."""
    headers = [tensor for name, tensor in tensors.items() if is_replicated(name)]
    has_head = any("lm_head" in name for name in tensors)
    return WeightTotals(
        total_bytes=sum(tensor.size for tensor in tensors.values()),
        half_bytes=_half_precision_bytes(tensors.values()),
        replicated_bytes=sum(tensor.size for tensor in headers),
        replicated_half_bytes=_half_precision_bytes(headers),
        parameters=_count_parameters(tensors, group_size or _DEFAULT_GROUP_SIZE),
        has_mtp_head=mtp_layout.has_head(tensors),
        experts=_part(tensor for name, tensor in tensors.items() if is_expert(name)),
        looked_up=_part(t for name, t in tensors.items() if is_looked_up(name, has_head=has_head)),
    )


def _part(tensors: Iterable[TensorHeader]) -> PartBytes:
    listed = tuple(tensors)
    return PartBytes(sum(tensor.size for tensor in listed), _half_precision_bytes(listed))


def _half_precision_bytes(tensors: Iterable[TensorHeader]) -> int:
    return sum(tensor.size for tensor in tensors if tensor.dtype in _HALF_PRECISION)


def _count_parameters(tensors: Mapping[str, TensorHeader], group_size: int) -> int:
    parameters = 0
    for name, tensor in tensors.items():
        if tensor.shape is None:
            return 0
        stem, _, last = name.rpartition(".")
        packed = tensors.get(f"{stem}.weight")
        if last in ("scales", "biases") and packed is not None and packed.dtype == "U32":
            continue
        scales = tensors.get(f"{stem}.scales")
        if last == "weight" and tensor.dtype == "U32" and scales is not None and scales.shape:
            # One scale for each group of a row gives the count of packed numbers, whatever their bits.
            parameters += math.prod(scales.shape) * group_size
        else:
            parameters += math.prod(tensor.shape)
    return parameters


# Limits of what is read of a folder, which may come from anybody: one tensor takes a kilobyte of memory. The largest
# published models have 100,000 tensors, indexes of 9 MB and tokenizers of 40 MB.
MAX_HEADER_BYTES, MAX_TENSORS, MAX_WEIGHT_FILES = 16 << 20, 200_000, 4_096
_MAX_INDEX_BYTES = 32 << 20
# Folders with models that are searched for, are reported, and are named in a message.
_MAX_SIBLINGS, _MAX_MODELS, _NAMED_MODELS = 1000, 100, 10
MAX_CONFIG_BYTES, _MAX_OTHER_BYTES = 1 << 20, 256 << 20
# Folders of models have a hundred files; listing a million takes seconds.
_MANY_FILES = 10_000
# Configs and templates; any other file is a tokenizer's.
_CONFIG_FILES = frozenset(
    {"config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"}
)
_READ_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")

# Prompt tokens that the engine prefills at once (LARGEST_CHUNK in engine/batch/step_plan.py), on Linux and on a Mac.
_PREFILL_LINUX, _PREFILL_MAC = 512, 2048
# Head sizes with a fused prefill kernel on Metal (mlx 0.32: sdpa_full).
_FUSED_HEAD_SIZES = (64, 80, 128)

# Further templates of a model, all of which transformers reads.
_TEMPLATE_FOLDER, _MAX_TEMPLATES = "additional_chat_templates", 32
_INDEX_FILE = "model.safetensors.index.json"
PARTIAL_MARK: Final = "partial-model.json"
"""The file that marks a folder without all weight files (models/partial_model.py)."""
# Each tensor of a header is an object; counting braces is cheaper than parsing.
_TENSOR_MARK = b"{"
# The parser builds an object of each value, used or not: 16 MB of `0,` took 600 MB of memory. A tensor has 6 values; an
# index has one for each tensor, and metadata some more.
_VALUE_MARK, _VALUES_OF_TENSOR, _OTHER_VALUES = b",", 8, MAX_TENSORS
# The format's own limit; a larger number is the beginning of some other file.
_FORMAT_HEADER_BYTES = 100_000_000

_M = TypeVar("_M", bound=BaseModel)


class ModelUnusableError(Exception):
    """The folder cannot be served; `reason` is one CamelCase word, and the message says what to correct."""

    def __init__(self, message: str, *, reason: str = "ModelUnusable") -> None:
        super().__init__(message)
        self.reason = reason


class _WeightIndex(BaseModel):
    weight_map: dict[str, str]


# mlx writes "__metadata__": null if there is none.
_HEADER_ADAPTER = TypeAdapter(dict[str, TensorHeader | dict[str, str] | None])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts in a model folder."""

    model_type: str
    module: str
    """The mlx-lm module that builds the model."""
    config: TextConfig
    weights: WeightTotals
    vision: VisionConfig | None = None
    speech: SpeechShape | None = None
    """Set if it transcribes or speaks; mlx-audio builds it then."""
    encoder: EncoderShape | None = None
    """Set if it is an encoder of BERT's kind; engine/encoder builds it then."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of all tensors on disk."""
        return self.weights.total_bytes

    @property
    def vocab_size(self) -> int | None:
        return self.config.vocab_size

    @property
    def max_context(self) -> int | None:
        if self.encoder is not None:
            return self.encoder.max_tokens
        return self.config.max_position_embeddings or self.config.model_max_length or None


def inspect_model(folder: Path) -> ModelFacts:
    """Return the facts in a model folder.

    Raises:
        ModelUnusableError: a file is missing, truncated or invalid.

    """
    try:
        if not folder.is_dir():
            raise ModelUnusableError(_absence(folder), reason="ModelNotFound")
        if not (folder / "config.json").is_file():
            raise ModelUnusableError(f"{folder} has no config.json: not a model directory")
        if (folder / PARTIAL_MARK).exists():
            raise ModelUnusableError(
                f"{folder} has only the weight files of one rank of a group; fetch the others with `fleetctl models pull`",
                reason="ModelPartial",
            )
        _check_sizes(folder)
        config = parse_json_file(ModelConfig, folder / "config.json")
        tensors: dict[str, TensorHeader] = {}
        for path in _weight_files(folder):
            tensors.update(read_tensors(path, most=MAX_TENSORS - len(tensors)))
        packing = config.quantization
        weights = total_weights(tensors, group_size=packing.group_size if packing else None)
        return model_facts(config, weights)
    except OSError as error:  # a name that is too long, or a parent folder without permission
        raise ModelUnusableError(
            f"cannot look into {folder}: {error.strerror}", reason="ModelNotFound"
        ) from error


def parsed_bytes(folder: Path) -> int:
    """Return about how many bytes of JSON an inspection of a model or an adapter parses; 0 if it cannot be read."""
    found = 0
    try:
        entries = folder.iterdir() if folder.is_dir() else iter(())
        for count, path in enumerate(entries):
            if count >= _MANY_FILES:
                return sys.maxsize
            if path.suffix == ".safetensors" and path.is_file():
                with path.open("rb") as file:
                    lead = file.read(LEAD_BYTES)
                # A longer one is refused before it is parsed.
                length = int.from_bytes(lead, "little")
                found += length if length <= MAX_HEADER_BYTES else 0
            elif path.name in (*_CONFIG_FILES, _INDEX_FILE, "adapter_config.json"):
                size = path.stat().st_size
                found += size if size <= _MAX_INDEX_BYTES else 0
    except OSError:  # the inspection says why
        return found
    return found


def model_folders(root: Path) -> dict[str, int]:
    """Return the paths of models up to two levels below a folder, each with the size of its weight files.

    Models that were fetched from a hub, whose folders have the commit in their name, are left out. Raises OSError.
    """
    configs = (
        path for pattern in ("*/config.json", "*/*/config.json") for path in root.glob(pattern)
    )
    folders = [path.parent for path in itertools.islice(configs, _MAX_SIBLINGS)]
    names = {
        folder.relative_to(root).as_posix(): folder for folder in folders if "@" not in folder.name
    }
    return {
        name: sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for name, folder in sorted(names.items())[:_MAX_MODELS]
        if not name.startswith(".")
    }


def _absence(folder: Path) -> str:
    """Return what is wrong with a path that is no folder, with the models that are beside it."""
    if folder.exists():
        return f"{folder} is not a directory"
    if not folder.parent.exists():
        return f"{folder} does not exist, nor does {folder.parent}"
    beside = [name for name in model_folders(folder.parent) if "/" not in name]
    near = difflib.get_close_matches(folder.name, beside, n=1)
    others = [name for name in beside if name not in near]
    rest = f" and {len(others) - _NAMED_MODELS} more" if len(others) > _NAMED_MODELS else ""
    listed = ", ".join(others[:_NAMED_MODELS]) + rest
    if not beside:
        return f"{folder} does not exist; {folder.parent} has no models"
    if not near:
        return f"{folder} does not exist; models there: {listed}"
    guess = f"{folder} does not exist; did you mean {near[0]}?"
    return f"{guess} Models there: {listed}" if listed else guess


def model_facts(config: ModelConfig, weights: WeightTotals) -> ModelFacts:
    """Return the facts of a model with this config.json and these weights."""
    return ModelFacts(
        model_type=config.model_type,
        module=cache_rules.mlx_module(config),
        config=config.text,
        weights=weights,
        vision=config.vision_config,
        speech=speech_shape.speech_shape(config),
        encoder=encoder_shape.encoder_shape(config),
    )


def model_geometry(facts: ModelFacts, *, casts_to_float32: bool) -> ModelGeometry:
    """Return the numbers that the memory proof needs; `unknown` says which could not be determined.

    `casts_to_float32` says that the engine converts 16-bit weights to 32 bits, as it does on Linux.
    """
    config, weights = facts.config, facts.weights
    widened = weights.half_bytes if casts_to_float32 else 0
    work = facts.speech or facts.encoder
    if work is not None:
        return _work_geometry(
            facts.model_type,
            work.work_bytes,
            weights_bytes=weights.total_bytes + widened,
            parameters=weights.parameters,
        )
    is_half = weights.half_bytes > 0
    element_bytes = 4 if casts_to_float32 or not is_half else 2
    unknown = "" if config.vocab_size is not None else "config.json lacks vocab_size"
    try:
        groups = cache_rules.layer_groups(facts.module, config, element_bytes=element_bytes)
    except NotUnderstoodError as error:
        groups, unknown = (), str(error)
    attends = next((group for group in groups if group.kind in ("Full", "Sliding")), None)
    active = (config.moe_intermediate_size or 0) * config.experts_of_token
    sizes = {group.head_dim for group in groups if group.kind != "State"}
    has_head = weights.has_mtp_head
    return ModelGeometry(
        model_type=facts.model_type,
        weights_bytes=weights.total_bytes + widened,
        replicated_bytes=weights.replicated_bytes
        + (weights.replicated_half_bytes if casts_to_float32 else 0),
        parameters=weights.parameters,
        layers=config.num_hidden_layers or 0,
        kv_heads=attends.kv_heads if attends is not None else 0,
        head_dim=attends.head_dim if attends is not None else 0,
        kv_element_bytes=element_bytes,
        vocab_size=config.vocab_size or 0,
        max_context=facts.max_context,
        groups=groups,
        hidden_size=config.hidden_size or 0,
        ffn_size=max(config.intermediate_size or 0, active),
        heads=config.num_attention_heads or 0,
        prefill_batch=1,
        prefill_step=_PREFILL_LINUX if casts_to_float32 else _PREFILL_MAC,
        is_attention_fused=not casts_to_float32 and sizes <= set(_FUSED_HEAD_SIZES),
        has_mtp_head=None if has_head is None else has_head and facts.module in mtp_layout.LAYOUTS,
        expert_bytes=weights.experts.total + (weights.experts.half if casts_to_float32 else 0),
        looked_up_bytes=weights.looked_up.total
        + (weights.looked_up.half if casts_to_float32 else 0),
        experts=config.expert_count,
        experts_of_token=min(config.experts_of_token, config.expert_count),
        vision=None if facts.vision is None else _vision_tower(facts.vision, facts.module),
        unknown=unknown,
    )


def _work_geometry(
    model_type: str, work_bytes: int, *, weights_bytes: int, parameters: int
) -> ModelGeometry:
    """Return the geometry of a model without caches: the same memory for any number of requests.

    There is no longest context: texts have the model's own limit, whatever the deployment's is.
    """
    return ModelGeometry(
        model_type=model_type,
        weights_bytes=weights_bytes,
        layers=0,
        kv_heads=0,
        head_dim=0,
        kv_element_bytes=4,
        vocab_size=0,
        parameters=parameters,
        work_bytes=work_bytes,
    )


# Of Qwen2-VL and Qwen2.5-VL, whose towers have the same sizes beside language models of 2 to 72 billion parameters.
_USUAL_TOWER: Final = VisionTower(patch=14, width=1_280, ffn=5_120, heads=16)


def _vision_tower(config: VisionConfig, module: str) -> VisionTower:
    usual = _USUAL_TOWER
    width = config.embed_dim or config.hidden_size or usual.width
    return VisionTower(
        patch=config.patch_size or usual.patch,
        width=width,
        ffn=config.intermediate_size or 4 * width,
        heads=config.num_heads or config.num_attention_heads or usual.heads,
        added_rows=len(config.deepstack_visual_indexes or ()),
        side=(config.image_size or 0) if module == "gemma3" else 0,
    )


def check_context(facts: ModelFacts, context_length: int) -> None:
    """Refuse a context that is longer than the model's own; an encoder's texts have its own limit in any case.

    Raises:
        ModelUnusableError: it is longer; the model's answers would be wrong.

    """
    if facts.encoder is None and facts.max_context and context_length > facts.max_context:
        raise ModelUnusableError(
            f"context length {context_length} is more than the model's "
            f"max_position_embeddings, {facts.max_context}"
        )


def _check_sizes(folder: Path) -> None:
    """Refuse a file that cannot be read whole, as the engine's libraries read all but weights.

    Links are followed wherever they lead, as in the caches of Hugging Face, but to files only: a device has no end.
    """
    for path in folder.iterdir():
        if path.suffix not in _READ_SUFFIXES or path.name == _INDEX_FILE:
            continue
        _check_file(path, MAX_CONFIG_BYTES if path.name in _CONFIG_FILES else _MAX_OTHER_BYTES)
    more = list(itertools.islice((folder / _TEMPLATE_FOLDER).glob("*"), _MAX_TEMPLATES + 1))
    if len(more) > _MAX_TEMPLATES:
        raise ModelUnusableError(
            f"{folder / _TEMPLATE_FOLDER} has more than {_MAX_TEMPLATES} files"
        )
    for path in more:
        _check_file(path, MAX_CONFIG_BYTES)


def _check_file(path: Path, limit: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # a link to nothing
        result = path.stat()
        if not stat.S_ISREG(result.st_mode) and not stat.S_ISDIR(result.st_mode):
            raise ModelUnusableError(f"{path} is not a file, or a link to none")
        _check_size(path, result.st_size, limit)


def _check_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise ModelUnusableError(f"{path} has {size} bytes; at most {limit} are read")


def _check_values(raw: bytes, path: Path) -> None:
    """Refuse JSON that takes far more memory than its size; parsing ends no sooner than the text."""
    count = raw.count(_VALUE_MARK)
    most = _OTHER_VALUES + _VALUES_OF_TENSOR * raw.count(_TENSOR_MARK)
    if count > most:
        raise ModelUnusableError(f"{path} has {count} values; at most {most} are read")


def _weight_files(folder: Path) -> list[Path]:
    # mlx-lm reads files with such names only.
    paths = list(itertools.islice(folder.glob("model*.safetensors"), MAX_WEIGHT_FILES + 1))
    if len(paths) > MAX_WEIGHT_FILES:
        raise ModelUnusableError(f"{folder} has more than {MAX_WEIGHT_FILES} weight files")
    present = {path.name: path for path in sorted(paths)}
    index = folder / _INDEX_FILE
    if index.is_file():
        parsed = parse_json_file(_WeightIndex, index, limit_bytes=_MAX_INDEX_BYTES)
        wanted = set(parsed.weight_map.values())
        absent = sorted(wanted - present.keys())
        if absent:
            raise ModelUnusableError(
                f"{folder} lacks {len(absent)} of {len(wanted)} weight files, first {absent[0]}"
            )
    if not present:
        pickled = next(folder.glob("*.bin"), None)
        if pickled is not None:
            raise ModelUnusableError(
                f"{pickled} is PyTorch's format, which may run code and is never read; load the model with transformers or "
                "sentence-transformers elsewhere and save it, which writes model.safetensors"
            )
        raise ModelUnusableError(f"{folder} has no model*.safetensors: no weights")
    return list(present.values())


def parse_json_file(model: type[_M], path: Path, *, limit_bytes: int = MAX_CONFIG_BYTES) -> _M:
    """Return a small JSON file, validated as `model`.

    Raises:
        ModelUnusableError: it cannot be read, is too large, or is invalid.

    """
    try:
        with path.open("rb") as file:
            _check_size(path, os.fstat(file.fileno()).st_size, limit_bytes)
            raw = file.read(limit_bytes)
        _check_values(raw, path)
        return model.model_validate_json(raw)
    except OSError as error:
        raise ModelUnusableError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelUnusableError(f"{path}: {where or 'content'}: {first['msg']}") from error


def read_tensors(path: Path, *, most: int = MAX_TENSORS) -> dict[str, TensorHeader]:
    """Return the tensors of a safetensors file by name.

    Raises:
        ModelUnusableError: the file is not a safetensors file, is truncated, or has more than `most` tensors.

    """
    if not path.is_file():  # opening a pipe would block until another process writes to it
        raise ModelUnusableError(f"{path} is not a file, or a link to none")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(header_length(file.read(LEAD_BYTES), path, size))
    except OSError as error:
        raise ModelUnusableError(f"cannot read {path}: {error.strerror}") from error
    return parse_header(raw, path, size, most=most)


LEAD_BYTES: Final = 8
"""The bytes of a safetensors file before its header: the header's length."""


def parse_header(
    raw: bytes, path: Path, size: int, *, most: int = MAX_TENSORS
) -> dict[str, TensorHeader]:
    """Return the tensors in the header of a safetensors file that has `size` bytes.

    Raises:
        ModelUnusableError: the header is broken, does not fit the size, or has more than `most` tensors.

    """
    if raw.count(_TENSOR_MARK) > most + 2:  # the whole, and the metadata
        raise ModelUnusableError(
            f"{path} has too many tensors: a model can have at most {MAX_TENSORS}"
        )
    _check_values(raw, path)
    try:
        entries = _HEADER_ADAPTER.validate_json(raw)
    except ValidationError as error:
        raise ModelUnusableError(f"{path} has a broken safetensors header") from error
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorHeader)}
    ends = (tensor.data_offsets[1] for tensor in tensors.values())
    expected = LEAD_BYTES + len(raw) + max(ends, default=0)
    if size != expected:
        raise ModelUnusableError(f"{path} was cut short: {size} bytes, its header says {expected}")
    return tensors


def header_length(lead: bytes, path: Path, size: int) -> int:
    """Return the length of the header of a safetensors file; `lead` is the file's first bytes.

    Raises:
        ModelUnusableError: it is no safetensors file, or its header is too long.

    """
    length = int(struct.unpack("<Q", lead)[0]) if len(lead) == 8 else 0
    if MAX_HEADER_BYTES < length <= min(_FORMAT_HEADER_BYTES, size - 8):
        raise ModelUnusableError(
            f"{path} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelUnusableError(f"{path} is not a safetensors file, or was cut short")
    return length
