"""The models on the disk of one Mac: the documents of the agent's routes for `fleetctl models`.

Everything in them is bounded: they come from another machine.
"""

from datetime import datetime
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints

from schemas.meta import ApiModel

PATH: Final = "/v1/models"
"""The agent's route of all models; a model is below it by the name of its folder."""
FETCHES_PATH: Final = "/v1/model-fetches"
QUANTIZATIONS_PATH: Final = "/v1/model-quantizations"
"""The agent's route of quantizations; one is below it by the name of its result, without the organisation."""
MAX_MODELS: Final = 2000
_MAX_USERS: Final = 1000
_MAX_FETCHES: Final = 100
_MAX_DEFECTS: Final = 1000

_HUB_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
FolderName = Annotated[
    str,
    StringConstraints(pattern=rf"^{_HUB_WORD}--{_HUB_WORD}@[0-9a-f]{{12}}$", max_length=260),
]
"""The name of a model's folder, `<organisation>--<name>@<first 12 digits of the commit>`: it has no part of a path."""
_Bytes = Annotated[int, Field(ge=0)]
_Text = Annotated[str, StringConstraints(max_length=2000)]


class StoredModelReport(ApiModel):
    """One commit of a repository that is on the disk of a Mac, whole or with the weight files of some layers."""

    name: FolderName
    repo: _Text
    commit: _Text
    size_bytes: _Bytes
    files: Annotated[int, Field(ge=0)]
    absent_files: Annotated[int, Field(ge=0)] = 0
    """Weight files that the ranks on this Mac do not need; 0 for a whole model."""
    absent_bytes: _Bytes = 0
    fetched_at: datetime
    loaded_at: datetime | None = None
    """The last load by an engine; None if there was none."""
    is_pinned: bool = False
    used_by: Annotated[tuple[_Text, ...], Field(max_length=_MAX_USERS)] | None = None
    """Objects and engines that name it, such as `modeldeployment/qwen`; None if the agent cannot read the store."""


class ModelFetchReport(ApiModel):
    """A fetch that a person asked an agent for."""

    name: FolderName
    phase: _Text
    total_bytes: _Bytes = 0
    present_bytes: _Bytes = 0
    bytes_per_s: float = 0.0
    eta_s: float | None = None
    source: _Text = ""
    waiting: _Text = ""
    error: _Text = ""
    """The reason and the message of the failure with which it ended; empty while it runs, and after success."""


QuantizationPhase: TypeAlias = Literal[
    "Queued", "Converting", "Storing", "Present", "Failed", "Cancelled"
]


QuantizationMode: TypeAlias = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
QuantizationRecipe: TypeAlias = Literal["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]


class QuantizationScheme(ApiModel):
    """The packing of weights, in the words of mlx-lm."""

    mode: QuantizationMode = "affine"
    bits: int = 4
    group_size: int = 64
    """Weights that share a scale, and with `affine` a bias."""
    quant_predicate: QuantizationRecipe | None = None
    """The recipe of mixed bits, which chooses the bits of each layer; `bits` are then those of most layers."""


class QuantizationQuality(ApiModel):
    """The nearness of a quantized model to its original, on a fixed text (engine/quantize/quality.py)."""

    tokens: int = 0
    original_perplexity: float | None = None
    perplexity: float | None = None
    top1_agreement: float | None = None
    """Part of the tokens for which both find the same next one likeliest."""
    mean_kl_divergence: float | None = None
    """In nats for each token, of the original's likeliest tokens and the rest as one: the true one is not smaller."""
    not_measured: _Text = ""
    """The reason if there are no figures."""

    @property
    def summary(self) -> str:
        """Return it in one line."""
        if self.not_measured:
            return f"not measured: {self.not_measured}"
        return (
            f"perplexity {self.perplexity or 0:.4g}, of the original {self.original_perplexity or 0:.4g}; same next token "
            f"{self.top1_agreement or 0:.1%}; KL divergence {self.mean_kl_divergence or 0:.3g} ({self.tokens} tokens)"
        )


class QuantizationReport(ApiModel):
    """A quantization that a person asked an agent for."""

    repo: _Text
    """The repository of the result, `fleet/NAME`."""
    source: FolderName
    scheme: QuantizationScheme
    phase: QuantizationPhase = "Queued"
    total_bytes: _Bytes = 0
    """Bytes that the result will have, estimated."""
    done_bytes: _Bytes = 0
    result: FolderName | None = None
    """The folder of the result, once it is in the store."""
    quality: QuantizationQuality | None = None
    error: _Text = ""

    @property
    def is_running(self) -> bool:
        """Return whether it waits or works."""
        return self.phase in ("Queued", "Converting", "Storing")


class NodeModels(ApiModel):
    """All models of one Mac."""

    models: Annotated[tuple[StoredModelReport, ...], Field(max_length=MAX_MODELS)] = ()
    fetches: Annotated[tuple[ModelFetchReport, ...], Field(max_length=_MAX_FETCHES)] = ()
    quantizations: Annotated[tuple[QuantizationReport, ...], Field(max_length=_MAX_FETCHES)] = ()
    disk_bytes: _Bytes = 0
    free_bytes: _Bytes = 0
    available_memory_bytes: _Bytes = 0
    """Memory that a new process can take without swapping."""


class ModelChange(ApiModel):
    """The result of a change to one model."""

    name: FolderName
    is_changed: bool
    """False if it was so before."""
    freed_bytes: _Bytes = 0


class ModelDefect(ApiModel):
    """One file that is not what the model's record says."""

    path: _Text
    defect: _Text
    message: _Text


class ModelCheck(ApiModel):
    """The result of a check of one model."""

    name: FolderName
    absent_files: Annotated[int, Field(ge=0)] = 0
    """Weight files that the record leaves out: no defects, but the model is not whole."""
    defects: Annotated[tuple[ModelDefect, ...], Field(max_length=_MAX_DEFECTS)] = ()
