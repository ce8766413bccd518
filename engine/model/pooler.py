"""The pooler of a model that makes vectors or scores: its config, and the weights of tokens. Must not import mlx.

An embedding model has sentence-transformers' files. A cross-encoder reads two texts together, and one linear layer turns
the last token's vector into a score: a `...ForSequenceClassification` with one label, of a family that mlx-lm has.

Every supported mode is a weighted sum over a text's tokens, so a long text can be read in pieces and padding weighs
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from models.model_files import ModelFacts, ModelUnusableError

Mode: TypeAlias = Literal["cls", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

ScoreActivation: TypeAlias = Literal["Sigmoid", "Identity"]

# sentence-transformers' older switches, and the equivalent values of the newer `pooling_mode`.
_MODES: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SUPPORTED = ("Transformer", "Pooling", "Normalize")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """The pooling of a text's hidden states into one vector."""

    mode: Mode
    width: int
    """Number of dimensions of a vector."""
    is_normalized: bool
    """True if vectors have length 1."""
    max_tokens: int | None = None
    """Most tokens of a text, if that is less than the context."""
    prefix: str = ""
    """Text that precedes every input; inputs given as tokens are left unchanged."""
    score: ScoreActivation | None = None
    """Set for a cross-encoder: its answer is one number for each pair of texts, after this function."""

    @property
    def output_width(self) -> int:
        """Return the number of dimensions of an answer."""
        return self.width if self.score is None else 1


class _Module(BaseModel):
    type: str
    path: str


class _Transformer(BaseModel):
    max_seq_length: Annotated[int, Field(ge=1)] | None = None
    do_lower_case: bool = False


class _Prompts(BaseModel):
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


class _Attention(BaseModel):
    is_causal: bool | None = None
    use_bidirectional_attention: bool | str | None = None


class _SentenceTransformers(BaseModel):
    activation_fn: str | None = None


class _Classifier(BaseModel):
    architectures: list[str] | None = None
    id2label: dict[str, str] | None = None
    num_labels: int | None = None
    sentence_transformers: _SentenceTransformers | None = None
    # The older name of its activation.
    sbert_ce_default_activation_function: str | None = None
    classifier_pooling: Literal["cls", "mean"] = "cls"


_MODULES = TypeAdapter(list[_Module])
_SWITCHES = TypeAdapter(dict[str, bool | int | str | None])


def read_config(folder: Path, facts: ModelFacts) -> PoolerConfig | None:
    """Return the pooler config of the folder's model; None if it makes neither vectors nor scores.

    Raises:
        ModelUnusableError: it is an embedding model whose vectors would be wrong here.

    """
    listing = folder / "modules.json"
    is_reranker = facts.encoder is not None and facts.encoder.task == "Rerank"
    if is_reranker or not listing.is_file():
        return _read_cross_encoder(folder / "config.json", facts)
    modules = {module.type.rpartition(".")[2]: module for module in _parse(_MODULES, listing)}
    if "Pooling" not in modules:
        return None
    for name in modules:
        if name not in _SUPPORTED:
            raise ModelUnusableError(
                f"{listing}: a module {name} is not supported; it may have {', '.join(_SUPPORTED)}"
            )
    if facts.encoder is None:
        _check_attention(folder / "config.json")
    switches = folder / modules["Pooling"].path / "config.json"
    settings = _optional(_Transformer, folder / "sentence_bert_config.json")
    if settings.do_lower_case:
        raise ModelUnusableError(
            f"{folder}/sentence_bert_config.json: do_lower_case is not supported"
        )
    prefix = _find_prefix(folder / "config_sentence_transformers.json")
    return PoolerConfig(
        mode=_find_mode(switches, has_prefix=bool(prefix)),
        width=_width(folder / "config.json", facts),
        is_normalized="Normalize" in modules,
        max_tokens=_limit(facts, settings.max_seq_length),
        prefix=prefix,
    )


def _read_cross_encoder(path: Path, facts: ModelFacts) -> PoolerConfig | None:
    """Return the config of a cross-encoder; None for a model that classifies nothing."""
    classifier = _optional(_Classifier, path)
    if not any(
        name.endswith("ForSequenceClassification") for name in classifier.architectures or ()
    ):
        return None
    # transformers writes neither for the two labels that it has by default.
    labels = (
        len(classifier.id2label) if classifier.id2label is not None else classifier.num_labels or 2
    )
    if labels != 1:
        raise ModelUnusableError(
            f"{path}: the model sorts texts into {labels} classes; a cross-encoder for /v1/rerank has one"
        )
    newer = classifier.sentence_transformers or _SentenceTransformers()
    named = (
        newer.activation_fn
        or classifier.sbert_ce_default_activation_function
        or "torch.nn.modules.activation.Sigmoid"
    )
    activations: dict[str, ScoreActivation] = {"Sigmoid": "Sigmoid", "Identity": "Identity"}
    name = named.rpartition(".")[2]
    if name not in activations:
        raise ModelUnusableError(
            f"{path}: the activation {named} is not supported; it must be Sigmoid or Identity"
        )
    return PoolerConfig(
        mode="lasttoken" if facts.encoder is None else classifier.classifier_pooling,
        width=_width(path, facts),
        is_normalized=False,
        max_tokens=_limit(facts, None),
        score=activations[name],
    )


def _width(path: Path, facts: ModelFacts) -> int:
    width = facts.config.hidden_size or facts.config.n_embd
    if width is None:
        raise ModelUnusableError(f"{path} lacks hidden_size, the width of its vectors")
    return width


def _limit(facts: ModelFacts, own: int | None) -> int | None:
    """Return the most tokens of a text: an encoder has no positions beyond its own limit."""
    if facts.encoder is None:
        return own
    return min(facts.encoder.max_tokens, own or facts.encoder.max_tokens)


def activate(logits: npt.NDArray[np.float32], how: ScoreActivation) -> npt.NDArray[np.float32]:
    """Return the scores of logits; sentence-transformers and vLLM use the sigmoid where a model says nothing."""
    if how == "Identity":
        return logits
    # Without an overflow for very negative logits.
    return np.asarray(np.exp(-np.logaddexp(0, -logits)), dtype=np.float32)


def encode_vectors(pooled: npt.NDArray[np.float32], pooling: PoolerConfig) -> list[bytes]:
    """Return one answer a row, as little-endian float32: a vector, or the score of a logit."""
    if pooling.score is not None:
        pooled = activate(pooled, pooling.score)
    elif pooling.is_normalized:
        pooled = normalize(pooled)
    return [row.tobytes() for row in pooled.astype("<f4")]


def weights(
    mode: Mode, lengths: Sequence[int], *, start: int, columns: int
) -> npt.NDArray[np.float32]:
    """Return the weights of `columns` tokens from `start` on in each text's vector; shape (texts, columns).

    Texts are padded on the right; `lengths` do not count padding.
    """
    at = np.arange(start, start + columns)[None, :]
    length = np.array(lengths)[:, None]
    if mode == "cls":
        found = at == 0
    elif mode == "lasttoken":
        found = at == length - 1
    elif mode == "mean":
        found = (at < length) / length
    elif mode == "mean_sqrt_len_tokens":
        found = (at < length) / np.sqrt(length)
    else:
        found = (at < length) * (at + 1) / (length * (length + 1) / 2)
    return np.asarray(found, dtype=np.float32)


def normalize(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Scale vectors, one a row, to length 1; a zero vector stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), dtype=np.float32)


def _find_mode(path: Path, *, has_prefix: bool) -> Mode:
    switches = _parse(_SWITCHES, path)
    if has_prefix and switches.get("include_prompt") is False:
        raise ModelUnusableError(
            f"{path}: include_prompt false is not supported with a default prompt"
        )
    chosen = switches.get("pooling_mode")
    modes = {mode: mode for mode in _MODES.values()}
    if isinstance(chosen, str) and chosen in modes:
        return modes[chosen]
    on = [
        name
        for name, value in switches.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    if chosen is None and len(on) == 1 and on[0] in _MODES:
        return _MODES[on[0]]
    name = chosen if chosen is not None else " and ".join(on) or "none"
    raise ModelUnusableError(
        f"{path}: pooling {name} is not supported; it must be one of {', '.join(modes)}"
    )


def _find_prefix(path: Path) -> str:
    settings = _optional(_Prompts, path)
    if settings.default_prompt_name is None:
        return ""
    if settings.default_prompt_name not in settings.prompts:
        raise ModelUnusableError(f"{path}: there is no prompt '{settings.default_prompt_name}'")
    return settings.prompts[settings.default_prompt_name]


def _check_attention(path: Path) -> None:
    settings = _optional(_Attention, path)
    if settings.is_causal is False or settings.use_bidirectional_attention not in (None, False):
        raise ModelUnusableError(
            f"{path}: the model attends in both directions, and mlx-lm only to earlier tokens; its vectors would be wrong"
        )


def _optional(kind: type[_T], path: Path) -> _T:
    return _parse(TypeAdapter(kind), path) if path.is_file() else kind()


def _parse(kind: TypeAdapter[_T], path: Path) -> _T:
    try:
        return kind.validate_json(path.read_bytes())
    except OSError as error:
        raise ModelUnusableError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelUnusableError(f"{path}: {where or 'content'}: {first['msg']}") from error
