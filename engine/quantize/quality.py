"""The cost of a quantization: both models read the same text, and the answers of the second are compared with the first.

The text is of this project's own documentation and code (Apache-2.0), in the state of the first release: it does not
change, so that figures can be compared.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.utils import load_model, load_tokenizer

from machinery.clock import Clock
from models.quantization import QUALITY_MODEL_BYTES
from schemas import quantity
from schemas.wire.stored_models import QuantizationQuality

_TEXT: Final = Path(__file__).with_name("quality_text.txt")
# Logits of 256 tokens of a vocabulary of 262,144 take 268 MB in float32.
_CHUNK: Final = 256
_MAX_TOKENS: Final = 2048
# A model that needs longer for a chunk than for all has one chunk measured.
_MAX_S: Final = 300.0
# The tokens whose probabilities are compared one by one; all others count as one.
_LIKELIEST: Final = 64


class _Answers(NamedTuple):
    """The answers of a model at each position of a chunk."""

    losses: npt.NDArray[np.float32]
    """Minus the logarithm of the probability of the token that follows."""
    likeliest: npt.NDArray[np.int64]
    """Ids of the likeliest tokens, as many in a row; those of the first model."""
    log_probabilities: npt.NDArray[np.float32]
    """Of these tokens."""
    top: npt.NDArray[np.int64]


def measure(source: Path, result: Path, memory_bytes: int, clock: Clock) -> QuantizationQuality:
    """Return perplexities, agreement and divergence; one model after the other is in memory.

    Args:
        source: the folder of the original.
        result: the folder of the quantized model.
        memory_bytes: what this process may take.
        clock: ends the measurement of the original after five minutes; the other one reads the same part.

    Raises:
        ValueError: mlx-lm cannot load a model; other errors mean the same.

    """
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    if weights + QUALITY_MODEL_BYTES > memory_bytes:
        return QuantizationQuality(
            not_measured=f"the original takes {quantity.show(weights + QUALITY_MODEL_BYTES)} to run, and "
            f"{quantity.show(memory_bytes)} are available"
        )
    load: Any = load_tokenizer  # without types
    tokenizer = load(source)
    tokens = tokenizer.encode(_TEXT.read_text(), add_special_tokens=False)[:_MAX_TOKENS]
    begin = tokenizer.encode("")[:1]  # the token that texts begin with, if there is one
    starts = range(0, len(tokens) - 1, _CHUNK)
    chunks = [[*begin, *tokens[at : at + _CHUNK + 1]] for at in starts]
    deadline = clock.monotonic() + _MAX_S
    first: list[_Answers] = []
    for answers in _read(source, chunks, None):
        first.append(answers)
        if clock.monotonic() > deadline:
            break
    second = list(_read(result, chunks[: len(first)], first))
    return _compare(first, second)


def _read(
    folder: Path, chunks: Sequence[list[int]], others: Sequence[_Answers] | None
) -> Iterator[_Answers]:
    """Yield the answers of a model for each chunk; with `others`, of the tokens that are likeliest there."""
    model, _ = load_model(folder)
    for number, chunk in enumerate(chunks):
        logits = model(mx.array([chunk[:-1]]))[0].astype(mx.float32)
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        rows = mx.arange(len(chunk) - 1)
        count = min(_LIKELIEST, logits.shape[-1])
        if others is None:
            likeliest = mx.argpartition(logits, -count, axis=-1)[:, -count:]
        else:
            likeliest = mx.array(others[number].likeliest)
        compared = mx.take_along_axis(logits, likeliest, axis=-1)
        yield _Answers(
            np.array(-logits[rows, mx.array(chunk[1:])]),
            np.array(likeliest),
            np.array(compared),
            np.array(mx.argmax(logits, axis=-1)),
        )


def _compare(first: Sequence[_Answers], second: Sequence[_Answers]) -> QuantizationQuality:
    before, after = (
        np.exp(np.concatenate([answers.losses for answers in part]).mean(dtype=np.float64))
        for part in (first, second)
    )
    agreeing = np.concatenate([a.top == b.top for a, b in zip(first, second, strict=True)])
    divergences = [
        _divergence(a.log_probabilities, b.log_probabilities)
        for a, b in zip(first, second, strict=True)
    ]
    return QuantizationQuality(
        tokens=len(agreeing),
        original_perplexity=_rounded(before),
        perplexity=_rounded(after),
        top1_agreement=_rounded(agreeing.mean()),
        mean_kl_divergence=_rounded(np.concatenate(divergences).mean()),
    )


def _divergence(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> Any:
    """Return the divergence of each position, with all other tokens as one: at most that over the vocabulary."""
    p, q = (np.exp(part.astype(np.float64)) for part in (first, second))
    rest_p, rest_q = (np.maximum(1 - part.sum(axis=-1), 1e-9) for part in (p, q))
    inside = (p * (first - second)).sum(axis=-1)
    return np.maximum(inside + rest_p * np.log(rest_p / rest_q), 0)


def _rounded(value: Any) -> float:
    return float(f"{float(value):.4g}")
