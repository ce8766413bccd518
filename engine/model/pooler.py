"""How a folder wants texts turned into vectors, by sentence-transformers' files. Pure; must not import mlx.

Every mode that is honoured is a weighted sum over a text's tokens, so that a long text may be read in pieces
and a padded place weighs nothing.
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

# sentence-transformers' older names, each with a boolean, and the newer ones of `pooling_mode`.
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
    """What becomes of a text's hidden states."""

    mode: Mode
    width: int
    """How many numbers a vector has."""
    is_normalized: bool
    """Whether vectors have length 1."""
    max_tokens: int | None = None
    """What a text may have at most, if that is less than the context."""
    prefix: str = ""
    """What goes before every text; a text given as tokens is taken as it is."""


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


_MODULES = TypeAdapter(list[_Module])
_SWITCHES = TypeAdapter(dict[str, bool | int | str | None])


def read_config(folder: Path, facts: ModelFacts) -> PoolerConfig | None:
    """Return how the folder's model makes vectors; None if it is no embedding model.

    Raises:
        ModelUnusableError: it is one, and would make wrong vectors here.

    """
    listing = folder / "modules.json"
    if not listing.is_file():
        return None
    modules = {module.type.rpartition(".")[2]: module for module in _parse(_MODULES, listing)}
    if "Pooling" not in modules:
        return None
    for name in modules:
        if name not in _SUPPORTED:
            raise ModelUnusableError(
                f"{listing}: a module {name} is not supported; it may have {', '.join(_SUPPORTED)}"
            )
    _check_attention(folder / "config.json")
    if facts.config.hidden_size is None:
        raise ModelUnusableError(
            f"{folder}/config.json lacks hidden_size, the width of its vectors"
        )
    switches = folder / modules["Pooling"].path / "config.json"
    own = _optional(_Transformer, folder / "sentence_bert_config.json")
    if own.do_lower_case:
        raise ModelUnusableError(
            f"{folder}/sentence_bert_config.json: do_lower_case is not supported"
        )
    prefix = _find_prefix(folder / "config_sentence_transformers.json")
    return PoolerConfig(
        mode=_find_mode(switches, has_prefix=bool(prefix)),
        width=facts.config.hidden_size,
        is_normalized="Normalize" in modules,
        max_tokens=own.max_seq_length,
        prefix=prefix,
    )


def weights(
    mode: Mode, lengths: Sequence[int], *, start: int, columns: int
) -> npt.NDArray[np.float32]:
    """Return what the tokens at `start` and after weigh in each text's vector.

    Shape [texts, columns]; texts are padded on the right, `lengths` are theirs without that.
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
    """Return vectors, one a row, of length 1; nothing stays nothing."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), dtype=np.float32)


def _find_mode(path: Path, *, has_prefix: bool) -> Mode:
    switches = _parse(_SWITCHES, path)
    if has_prefix and switches.get("include_prompt") is False:
        raise ModelUnusableError(
            f"{path}: include_prompt false is not supported with a default prompt"
        )
    chosen = switches.get("pooling_mode")
    named = {mode: mode for mode in _MODES.values()}
    if isinstance(chosen, str) and chosen in named:
        return named[chosen]
    on = [
        name
        for name, value in switches.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    if chosen is None and len(on) == 1 and on[0] in _MODES:
        return _MODES[on[0]]
    wanted = chosen if chosen is not None else " and ".join(on) or "none"
    raise ModelUnusableError(
        f"{path}: pooling {wanted} is not supported; it must be one of {', '.join(named)}"
    )


def _find_prefix(path: Path) -> str:
    own = _optional(_Prompts, path)
    if own.default_prompt_name is None:
        return ""
    if own.default_prompt_name not in own.prompts:
        raise ModelUnusableError(f"{path}: there is no prompt '{own.default_prompt_name}'")
    return own.prompts[own.default_prompt_name]


def _check_attention(path: Path) -> None:
    own = _optional(_Attention, path)
    if own.is_causal is False or own.use_bidirectional_attention not in (None, False):
        raise ModelUnusableError(
            f"{path}: the model reads in both directions, mlx-lm only forwards; its vectors would be wrong"
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
