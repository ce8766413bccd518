"""Sampling: distributions, seeds, independence of the batch, and continuation of an interrupted answer."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.sampling import uniform
from engine.jobs import SamplingParams
from tests.engine.batch.conftest import NewBatch
from tests.support.engine_batches import PROMPTS, drain, job, run
from tests.support.mlx_models import module
from tests.support.sampling import samples

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

RULES: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"presence_penalty": 1.0},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": ((20, 4.0), (30, -100.0))},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
]


# Each rule is there once; the others of its kind are for CI.
_IN_CI = ("top_p", "top_k", "min_p", "frequency_penalty")


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(
            rules,
            id=str(rules),
            marks=[pytest.mark.ci] if len(rules) == 1 and set(rules) <= set(_IN_CI) else [],
        )
        for rules in RULES
    ],
)
def test_a_seed_gives_the_same_answer_alone_in_a_batch_and_after_a_break(
    new: NewBatch, rules: dict[str, Any]
) -> None:
    sampling = SamplingParams(temperature=0.9, seed=5, **rules)
    wanted = run(new(), job(0, PROMPTS[3], sampling=sampling))[0]
    others = [
        job(
            n,
            PROMPTS[n],
            sampling=SamplingParams(temperature=0.7, seed=n),
            top_logprobs=n % 3 or None,
        )
        for n in range(1, 8)
    ]
    assert run(new(), *others[:4], job(0, PROMPTS[3], sampling=sampling), *others[4:])[0] == wanted
    for cut in (1, 2, 9, 19):
        emitted = tuple(wanted[:cut])
        rest = run(new(), job(0, PROMPTS[3], sampling=sampling, emitted=emitted))[0]
        assert wanted[:cut] + rest == wanted, cut


def test_other_seeds_give_other_answers(new: NewBatch) -> None:
    def answer(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=1, seed=seed)
        return run(new(), job(0, PROMPTS[3], sampling=sampling))[0]

    assert answer(1) != answer(2) != answer(-1)
    assert answer(-1) == answer(2**64 - 1)


def test_an_empty_nucleus_is_greedy(new: NewBatch) -> None:
    wanted = run(new(), job(0, PROMPTS[3]))[0]
    for rules in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}):
        sampling = SamplingParams(temperature=1, seed=5, **rules)
        assert run(new(), job(0, PROMPTS[3], sampling=sampling))[0] == wanted


def weights(rules: SamplingParams, logits: list[float]) -> Counter[int]:
    """Sample 4,000 times from the same logits."""
    mx, sampling = module("mlx.core"), module("engine.batch.sampling")
    count = 4000
    rows = mx.array(np.tile(np.array(logits, dtype=np.float32), (count, 1)))
    chosen = sampling.sample(rows, sampling.SamplingColumns.of([rules] * count), range(count))
    return Counter(chosen.tolist())


LOGITS = [math.log(part) for part in (0.4, 0.3, 0.15, 0.1, 0.05)]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, (0.4, 0.3, 0.15, 0.1, 0.05)),
        ({"top_k": 2}, (4 / 7, 3 / 7, 0, 0, 0)),
        ({"top_p": 0.69}, (4 / 7, 3 / 7, 0, 0, 0)),
        ({"top_p": 0.71}, (0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0)),
        ({"min_p": 0.3}, (0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0)),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.12}, (0, 0, 0.5, 1 / 3, 1 / 6)),
    ],
)
def test_sampled_shares_match_the_distribution(
    rules: dict[str, Any], expected: tuple[float, ...]
) -> None:
    counter = weights(SamplingParams(temperature=1, seed=3, **rules), LOGITS)
    for token, share in enumerate(expected):
        assert counter[token] / 4000 == pytest.approx(share, abs=0.035), (token, counter)
        assert share or not counter[token]


def test_a_nucleus_larger_than_the_candidates_is_found() -> None:
    mx, sampling = module("mlx.core"), module("engine.batch.sampling")
    flat = mx.zeros((2, 5000))
    rules = sampling.SamplingColumns.of(
        [SamplingParams(temperature=1, top_p=0.5, seed=seed) for seed in (1, 2)]
    )
    kept = sampling._top_p(mx.exp(flat), rules.top_p)
    assert mx.all(kept > 0).item()  # all are equal, so all are in it
    steep = mx.array([[-at / 3000 for at in range(5000)]] * 2)
    kept = sampling._top_p(mx.exp(steep), rules.top_p)
    share = np.exp(np.arange(5000) / -3000)
    size = int(np.searchsorted(np.cumsum(share), 0.5 * share.sum())) + 1
    assert int(mx.sum(kept[0] > 0).item()) == pytest.approx(size, abs=1)


@settings(max_examples=samples(200), deadline=None)
@given(seed=st.integers(-(2**63), 2**64), index=st.integers(0, 2**24))
def test_a_random_number_is_in_range_and_depends_on_its_index(seed: int, index: int) -> None:
    number = uniform(seed, index)
    assert 0 <= number < 1
    assert np.float32(number) == number
    assert len({uniform(seed, at) for at in range(index, index + 50)}) > 45
    assert number != uniform(seed, index, stream=1) or number == uniform(seed, index)


def test_random_numbers_are_distributed_evenly() -> None:
    found = np.histogram([uniform(seed, at) for seed in range(100) for at in range(100)], bins=10)[
        0
    ]
    assert found.min() > 850
    assert found.max() < 1150


def test_logprobs_are_those_of_the_model(loaded: Any, new: NewBatch) -> None:
    mx = module("mlx.core")
    batch = new()
    sampling = SamplingParams(temperature=0.8, seed=3, logit_bias=((44, 5.0),))
    batch.add(job(1, PROMPTS[4], max_tokens=6, sampling=sampling, top_logprobs=3))
    batch.add(job(2, PROMPTS[2], max_tokens=9))
    made = drain(batch)
    assert all(output.logprobs is None for output in made[2])
    seen = list(PROMPTS[4])
    for output in made[1]:
        logits = loaded.model(mx.array([seen]))[0, -1]
        logprobs = np.array(logits - mx.logsumexp(logits))
        assert output.logprobs is not None
        assert output.logprobs.logprob == pytest.approx(float(logprobs[output.token]), abs=1e-4)
        best = np.argsort(-logprobs)[:3].tolist()
        assert [token for token, _ in output.logprobs.top] == best
        seen.append(output.token)
