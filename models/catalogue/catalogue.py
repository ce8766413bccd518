"""Reads the catalogue of well-known models. Sizes are computed from configs and parameter counts, and never written down."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import resources
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from models import model_files
from models.hf_config import ModelConfig
from models.model_files import ModelFacts, PartBytes, WeightTotals
from schemas.deployment import HUB_REPO_PATTERN

GROUP_SIZE: Final = 64
"""Weights that share a scale and a bias: mlx-lm's default, with which these repositories were made."""
MAX_CATALOGUE_BYTES: Final = 2 << 20
BITS: Final = (4, 8)
"""Quantizations that the catalogue answers for; those that most repositories of mlx-community have."""
WHOLE_BITS: Final = 16
"""Bits of weights as they were trained; models that transcribe or speak, and encoders, are small, and not quantized."""

_HALF_BYTES: Final = 2
# Bytes of 32 numbers, in all and in 16 bits: MXFP4 has a scale of one byte, mlx's integers a scale and a bias of two.
_PACKED_BYTES: Final = {"MXFP4": (17, 0), "INT4": (20, 4)}
_MAX_MODELS, _MAX_VALUES = 2_000, 200_000
_Count = Annotated[int, Field(ge=0, le=2**48)]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]
_Word = Annotated[str, StringConstraints(max_length=200)]
_Repo = Annotated[str, StringConstraints(pattern=HUB_REPO_PATTERN)]


class CatalogueError(Exception):
    """The content is no catalogue that this release reads; the message says where, and what was expected."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)


class WeightCounts(_Part):
    """Parameters as mlx-lm builds the model (engine/catalogue_weights.py writes them)."""

    packed: _Count
    """Numbers in matrices that mlx quantizes."""
    plain: _Count
    """Other numbers: norms, biases, and matrices whose width no group divides."""
    packed_replicated: _Count
    plain_replicated: _Count
    """The parts that every rank of a split model keeps whole."""
    experts: _Count
    """Numbers of routed experts, a part of `packed`."""
    looked_up: _Count
    """Numbers of tables of which a token reads one row, a part of `packed`."""


class CatalogueModel(_Part):
    """One model, in whatever quantization."""

    org: _Name
    license: _Word
    task: Literal["Generate", "Embed", "Rerank", "Transcribe", "Speak"]
    inputs: tuple[Literal["Text", "Image", "Video", "Audio"], ...]
    format: _Word
    """Format of its tool calls (engine/text/formats)."""
    reasons: bool
    """True if it can think before it answers."""
    source: _Word
    """Origin of the figures."""
    repositories: dict[Literal["4", "8", "16", "32"], _Repo]
    """Repositories that engines run as they are, by bits: conversions for MLX, and originals in safetensors."""
    packed_experts: Literal["MXFP4", "INT4"] | None = None
    """Format of its routed experts as published, which conversions keep; None if they have the bits of the rest."""
    config: dict[str, Any]
    """The fields of its config.json that determine tensors and caches."""
    weights: WeightCounts
    towers: _Count
    """Parameters of vision and audio towers in its repositories, which stay in 16 bits; 0 without."""


class CatalogueFile(BaseModel):
    """The content of catalogue.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    date: date
    """Day on which the list was written."""
    models: dict[_Name, CatalogueModel] = Field(max_length=_MAX_MODELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model of the list in one quantization."""

    name: str
    repo: str
    """The repository that has it, or the original one if none is known."""
    is_published: bool
    """True if engines run the repository as it is, in these bits."""
    bits: int
    model: CatalogueModel
    facts: ModelFacts

    @property
    def title(self) -> str:
        """The repository, with what must happen to it before it runs."""
        remedy = "quantize" if self.bits < WHOLE_BITS else "convert"
        return self.repo if self.is_published else f"{self.repo} ({remedy})"

    @property
    def active_parameters(self) -> int:
        """The parameters that one token passes."""
        config, counts = self.facts.config, self.model.weights
        total = counts.packed + counts.plain
        if not config.expert_count:
            return total
        idle = config.expert_count - min(config.experts_of_token, config.expert_count)
        return total - counts.experts * idle // config.expert_count


def parse_catalogue(raw: bytes) -> CatalogueFile:
    """Return the content of a catalogue.

    Raises:
        CatalogueError: it is too large, or malformed.

    """
    if len(raw) > MAX_CATALOGUE_BYTES:
        raise CatalogueError(f"it has {len(raw)} bytes; at most {MAX_CATALOGUE_BYTES} are read")
    if raw.count(b",") > _MAX_VALUES:
        raise CatalogueError(f"it has more than {_MAX_VALUES} values")
    try:
        catalogue = CatalogueFile.model_validate_json(raw)
        for model in catalogue.models.values():
            ModelConfig.model_validate(model.config)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CatalogueError(f"{where or 'content'}: {first['msg']}") from error
    return catalogue


@cache
def shipped_catalogue() -> CatalogueFile:
    """Return the list of this release."""
    return parse_catalogue(
        resources.files("models.catalogue").joinpath("catalogue.json").read_bytes()
    )


def entries(catalogue: CatalogueFile) -> Iterator[CatalogueEntry]:
    """Yield each model of the list in each of its bits."""
    return _entries(catalogue.models.items())


def _entries(models: Iterable[tuple[str, CatalogueModel]]) -> Iterator[CatalogueEntry]:
    for name, model in models:
        config = ModelConfig.model_validate(model.config)
        facts = model_files.model_facts(config, quantized_weights(model, WHOLE_BITS))
        is_whole = facts.speech is not None or facts.encoder is not None
        published = {int(bits): repo for bits, repo in model.repositories.items()}
        for bits in sorted({*published, *(() if is_whole else BITS)}) or (WHOLE_BITS,):
            yield CatalogueEntry(
                name=name,
                repo=published.get(bits, f"{model.org}/{name}"),
                is_published=bits in published,
                bits=bits,
                model=model,
                facts=model_files.model_facts(config, quantized_weights(model, bits)),
            )


def search(words: Sequence[str], catalogue: CatalogueFile) -> tuple[CatalogueEntry, ...]:
    """Return the entries that have every word in name, architecture, licence, task or inputs, the smallest first."""
    wanted = [word.lower() for word in words]
    matches = []
    for entry in entries(catalogue):
        model = entry.model
        fields = (entry.facts.model_type, model.license, model.task, f"{entry.bits}bit")
        text = " ".join((entry.repo, *fields, *model.inputs)).lower()
        if all(word in text for word in wanted):
            matches.append(entry)
    return tuple(sorted(matches, key=lambda entry: (entry.facts.weight_bytes, entry.repo)))


def find(repo: str, catalogue: CatalogueFile) -> CatalogueEntry | None:
    """Return the entry of a repository that runs as it is; None if the list does not have it."""
    models = [
        (name, model)
        for name, model in catalogue.models.items()
        if repo in model.repositories.values()
    ]
    listed = (entry for entry in _entries(models) if entry.is_published and entry.repo == repo)
    return next(listed, None)


def quantized_weights(model: CatalogueModel, bits: int) -> WeightTotals:
    """Return the sums over the tensors of the model in this many bits, with a scale and a bias for each group."""
    counts = model.weights
    # mlx-lm, which quantizes what no repository has, leaves them out.
    towers = model.towers if str(bits) in model.repositories else 0

    def part(packed: int, plain: int = 0) -> PartBytes:
        if bits >= WHOLE_BITS:
            whole = bits // 8 * (packed + plain)
            return PartBytes(whole, whole if bits == WHOLE_BITS else 0)
        half = _HALF_BYTES * (2 * packed // GROUP_SIZE + plain)
        return PartBytes(packed * bits // 8 + half, half)

    experts = part(counts.experts)
    if model.packed_experts is not None:
        bytes_of_32, half_bytes_of_32 = _PACKED_BYTES[model.packed_experts]
        numbers = counts.experts // 32
        experts = PartBytes(numbers * bytes_of_32, numbers * half_bytes_of_32)
    rest = part(counts.packed - counts.experts, counts.plain + towers)
    replicated = part(counts.packed_replicated, counts.plain_replicated + towers)
    return WeightTotals(
        total_bytes=rest.total + experts.total,
        half_bytes=rest.half + experts.half,
        replicated_bytes=replicated.total,
        replicated_half_bytes=replicated.half,
        parameters=counts.packed + counts.plain + towers,
        experts=experts,
        looked_up=part(counts.looked_up),
    )
