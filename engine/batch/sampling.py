"""Sampling: chooses the next tokens of a whole batch at once, each row by its own parameters.

The order is that of Hugging Face's generation: penalties and bias, grammar, temperature, top-k, top-p, min-p, XTC.
A token is chosen where the running sum of probabilities passes the row's random number. Nothing is sorted unless a row
asks for a nucleus. The number depends only on the seed and the token's index, never on mx.random's state: a seeded
answer is the same in any batch, and another process can continue it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.jobs import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int, stream: int = 0) -> float:
    """Return a random number in [0, 1), a multiple of 2**-24: exact in float32, and never rounded to 1.

    It is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") of the seed, then of
    the index. `stream` distinguishes several numbers of one index.
    """
    state = _mix((seed & _MASK) + _GOLDEN)
    return (_mix(state + (2 * index + 1 + (stream << 40)) * _GOLDEN) >> 40) / (1 << 24)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


Array: TypeAlias = Any  # mlx ships no types
Floats: TypeAlias = npt.NDArray[np.float32]

# Nearly every nucleus lies within this many tokens, which are found without sorting the vocabulary.
_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of a batch's rows, as columns; rebuilt when rows join or leave."""

    samplings: tuple[SamplingParams, ...]
    are_greedy: bool
    temperature: Array
    top_k: tuple[int, ...]
    top_p: Array
    min_p: Array
    cuts: frozenset[str]
    """The subset of top_k, top_p, min_p and xtc that any row asks for."""

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams]) -> "SamplingColumns":
        """Return the columns of these rows."""
        random = [sampling for sampling in samplings if sampling.temperature > 0]
        cuts = {
            "top_k": any(params.top_k > 0 for params in random),
            "top_p": any(params.top_p < 1 for params in random),
            "min_p": any(params.min_p > 0 for params in random),
            "xtc": any(params.xtc_probability > 0 for params in random),
        }
        return cls(
            samplings=tuple(samplings),
            are_greedy=not random,
            temperature=_column([sampling.temperature or 1.0 for sampling in samplings]),
            top_k=tuple(sampling.top_k for sampling in samplings),
            top_p=_column([sampling.top_p for sampling in samplings]),
            min_p=_column([sampling.min_p for sampling in samplings]),
            cuts=frozenset(name for name, is_used in cuts.items() if is_used),
        )


def sample(logits: Array, rules: SamplingColumns, indices: Sequence[int]) -> Array:
    """Return one token a row, shape (rows,), from float logits of shape (rows, vocabulary).

    `indices` is the index of each row's new token in its sequence.
    """
    greedy = mx.argmax(logits, axis=-1).astype(mx.uint32)
    if rules.are_greedy:
        return greedy
    wide = logits.astype(mx.float32)
    weights = mx.exp((wide - mx.max(wide, axis=-1, keepdims=True)) / rules.temperature)
    if "top_k" in rules.cuts:
        weights = _top_k(weights, rules)
    if "top_p" in rules.cuts:
        weights = _top_p(weights, rules.top_p)
    if "min_p" in rules.cuts:
        largest = mx.max(weights, axis=-1, keepdims=True)
        weights = mx.where(weights >= rules.min_p * largest, weights, 0)
    if "xtc" in rules.cuts:
        weights = _xtc(weights, rules, indices)
    sums = mx.cumsum(weights, axis=-1)
    at = _column([uniform(one.seed, i) for one, i in zip(rules.samplings, indices, strict=True)])
    drawn = mx.argmax(sums > at * sums[:, -1:], axis=-1).astype(mx.uint32)
    is_greedy = mx.array([sampling.temperature == 0 for sampling in rules.samplings])
    return mx.where(is_greedy, greedy, drawn)


def _top_k(weights: Array, rules: SamplingColumns) -> Array:
    """Keep the k largest weights of each row, and those equal to the smallest of them."""
    size = weights.shape[-1]
    widest = min(max(rules.top_k), size)
    largest = mx.sort(mx.topk(weights, widest, axis=-1), axis=-1)  # ascending
    at = [widest - min(k, widest) if 0 < k < size else -1 for k in rules.top_k]
    index = mx.array([[max(one, 0)] for one in at])
    limit = mx.take_along_axis(largest, index, axis=-1)
    limit = mx.where(mx.array([[one < 0] for one in at]), 0, limit)
    return mx.where(weights >= limit, weights, 0)


def _top_p(weights: Array, top_p: Array) -> Array:
    """Keep each row's smallest set of likeliest tokens whose probability is at least p."""
    required = top_p * mx.sum(weights, axis=-1, keepdims=True)
    size = weights.shape[-1]
    largest = weights if size <= _CANDIDATES else mx.topk(weights, _CANDIDATES, axis=-1)
    is_flat = mx.any((mx.sum(largest, axis=-1, keepdims=True) < required) & (top_p < 1))
    if size > _CANDIDATES and is_flat.item():
        largest = weights  # the nucleus of a nearly flat row is larger, and needs a full sort
    falling = -mx.sort(-largest, axis=-1)
    # A token belongs to the nucleus if the sum of the weights before it is less than p.
    belongs = mx.cumsum(falling, axis=-1) - falling < required
    limit = mx.min(mx.where(belongs, falling, mx.inf), axis=-1, keepdims=True)
    return mx.where((weights >= limit) | (top_p >= 1), weights, 0)


def _xtc(weights: Array, rules: SamplingColumns, indices: Sequence[int]) -> Array:
    """Exclude top choices: with some probability, keep only the least likely of the tokens above the threshold.

    Same as mlx-lm's `apply_xtc` (sample_utils.py), but that function never excludes special tokens and this one does.
    """
    happens = [
        uniform(one.seed, i, stream=1) < one.xtc_probability
        for one, i in zip(rules.samplings, indices, strict=True)
    ]
    if not any(happens):
        return weights
    threshold = _column([sampling.xtc_threshold for sampling in rules.samplings])
    above = weights > threshold * mx.sum(weights, axis=-1, keepdims=True)
    least = mx.min(mx.where(above, weights, mx.inf), axis=-1, keepdims=True)
    is_excluded = above & (weights > least) & mx.array([[happen] for happen in happens])
    return mx.where(is_excluded, 0, weights)


def _column(values: Sequence[float]) -> Array:
    return mx.array(np.array(values, dtype=np.float32)[:, None])
