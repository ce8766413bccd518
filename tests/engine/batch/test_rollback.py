"""Guesses for models with recurrent states and windows: answers stay the same, whatever part of a guess is right."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.jobs import SamplingParams, TokenOutput
from models import footprint
from models.footprint import ServingLoad
from schemas.kv_cache import KvCache
from tests.support.engine_batches import drain, job, load, new_batch, run, step, tokens
from tests.support.mlx_models import Late
from tests.support.model_families import config_of, save
from tests.support.model_geometries import build, geometry

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]

# A state and a window.
QUICK = ("mamba2", "gemma3_text")
OTHERS = ("qwen3_next", "qwen3_5", "kimi_linear", "nemotron_h", "jamba", "lfm2", "gpt_oss", "gemma4_text", "cohere2")  # fmt: skip
TOKENS = 60
"""More than the windows of these models, with a prompt of as many tokens."""


class Proposer:
    """Proposes what the answers are known to say, in turn one to four tokens of which none to all are right."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers = answers
        self._turns = itertools.cycle(
            (count, right) for count in range(1, 5) for right in range(count + 1)
        )
        self.proposed_tokens = self.accepted_tokens = 0
        self.rejections: set[tuple[int, int]] = set()
        """(proposed tokens, right ones) of guesses that were partly wrong."""

    def is_promising(self, sequence: Any, most: int) -> bool:
        del sequence
        return most > 0

    def propose(self, sequence: Any, most: int) -> list[int]:
        start = len(sequence.outputs)
        count, right = next(self._turns)
        guess = self._answers[sequence.job_id][start : start + min(most, count)]
        guess[right : right + 1] = [(token + 1) % 500 for token in guess[right : right + 1]]
        self.proposed_tokens += len(guess)
        return guess

    def note_step(self, proposed: int, *, accepted: int, passes: int) -> None:
        del passes
        self.accepted_tokens += accepted
        if accepted < proposed:
            self.rejections.add((proposed, accepted))

    def record_time(self, seconds: float) -> None:
        del seconds


def model_of(folder: Path, name: str) -> Any:
    # A head of its own, so that a model of random weights does not repeat its last token.
    save(folder, name, tie_word_embeddings=False)
    return load(folder)


def guessing(loaded: Any, folder: Path, proposer: Any, **changes: Any) -> Any:
    batch = new_batch(loaded, folder, **changes)
    batch.executor.proposer = proposer
    batch.executor.decode_stage = batch.executor._new_decode_stage()
    return batch


def unguessed(batch: Any) -> None:
    """Make no more guesses; the batch is idle."""
    batch.executor.proposer = None
    batch.executor.decode_stage = batch.executor._new_decode_stage()


def prompt_of(length: int, seed: int = 5) -> list[int]:
    return random.Random(seed).choices(range(4, 260), k=length)


def logprobs_of(outputs: Sequence[Any]) -> list[float]:
    return [output.logprobs.logprob for output in outputs]


def scores(outputs: Sequence[Any]) -> Any:
    return pytest.approx(logprobs_of(outputs), abs=1e-3)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.ci) for name in OTHERS)]
)
def test_answers_are_the_same_with_partly_wrong_guesses(tmp_path: Path, name: str) -> None:
    loaded = model_of(tmp_path, name)
    plain = new_batch(loaded, tmp_path)
    first = job(0, prompt_of(TOKENS), max_tokens=TOKENS, min_tokens=TOKENS, top_logprobs=1)
    plain.add(first)
    wanted = drain(plain)[0]
    proposer = Proposer({0: tokens(wanted)})
    batch = guessing(loaded, tmp_path, proposer)
    batch.add(first)
    made = drain(batch)[0]
    assert tokens(made) == tokens(wanted)
    assert logprobs_of(made) == scores(wanted)
    assert len(proposer.rejections) == 10, "rejected after each number of right tokens"
    # What it left in the prefix cache is right, and reaches to its last token but one.
    turn = [*first.prompt, *tokens(wanted), *prompt_of(9, seed=6)]
    again = job(1, turn, max_tokens=8, top_logprobs=1)
    fresh = new_batch(loaded, tmp_path)
    fresh.add(again)
    wanted = drain(fresh)[1]
    unguessed(batch)
    batch.add(again)
    made = drain(batch)[1]
    assert made[0].cached_tokens >= len(first.prompt) + TOKENS - 1
    assert logprobs_of(made) == scores(wanted)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text", "nemotron_h"])
def test_rows_come_and_go_between_guesses(tmp_path: Path, name: str) -> None:
    loaded = model_of(tmp_path, name)
    jobs = [
        job(at, prompt_of(30 + 50 * at, seed=at), max_tokens=90, min_tokens=90) for at in range(3)
    ]
    wanted = {one.id: run(new_batch(loaded, tmp_path), one)[one.id] for one in jobs}
    proposer = Proposer(wanted)
    batch = guessing(loaded, tmp_path, proposer)
    batch.add(jobs[0])
    made: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def read_until(number: int, count: int) -> None:
        while len(made[number]) < count:
            for output in step(batch):
                assert isinstance(output, TokenOutput), output
                made[output.job_id].append(output.token)

    read_until(0, 20)
    before = proposer.proposed_tokens
    assert before > 0
    batch.add(jobs[1])  # beside a row that has guessed, which pauses
    read_until(1, 10)
    batch.remove(1)
    read_until(0, 50)
    assert proposer.proposed_tokens > before, "guesses resume"
    batch.add(jobs[2])
    read_until(2, 5)
    batch.remove(0)  # the row that never guessed goes on alone, and guesses
    read_until(2, 60)
    batch.remove(2)
    step(batch)
    assert batch.is_idle
    assert all(wanted[at][: len(part)] == part for at, part in made.items())
    # Each left its tokens in the prefix cache, with states that fit them.
    unguessed(batch)
    for one in jobs:
        turn = job(7, [*one.prompt, *made[one.id], 9, 8, 7], max_tokens=8, top_logprobs=1)
        fresh = new_batch(loaded, tmp_path)
        fresh.add(turn)
        batch.add(turn)
        answer = drain(batch)[7]
        assert answer[0].cached_tokens >= len(one.prompt)
        assert logprobs_of(answer) == scores(drain(fresh)[7])


@pytest.mark.ci
@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_declared_window_goes_with_guesses(tmp_path: Path, name: str, keep: int) -> None:
    loaded = model_of(tmp_path, name)
    one = job(0, prompt_of(TOKENS), max_tokens=TOKENS, min_tokens=TOKENS, top_logprobs=1)
    window = KvCache(window=24, keep=keep or None)
    plain = new_batch(loaded, tmp_path, kv_cache=window)
    plain.add(one)
    wanted = drain(plain)[0]
    proposer = Proposer({0: tokens(wanted)})
    batch = guessing(loaded, tmp_path, proposer, kv_cache=window)
    batch.add(one)
    made = drain(batch)[0]
    assert tokens(made) == tokens(wanted)
    assert logprobs_of(made) == scores(wanted)
    assert proposer.rejections


@pytest.mark.ci
@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "gemma3_text", "gpt_oss"])
def test_a_draft_model_may_have_states_and_windows(tmp_path: Path, name: str) -> None:
    """As its own draft nearly each guess of a model is right, for which the draft must have read what the model has."""
    loaded = model_of(tmp_path, name)
    first, second = (
        job(at, prompt_of(40, seed=at), max_tokens=TOKENS, min_tokens=TOKENS) for at in (0, 1)
    )
    plain = new_batch(loaded, tmp_path)
    wanted = run(plain, first) | run(plain, second)
    drafted = dataclasses.replace(loaded, draft=loaded.model)
    batch = new_batch(drafted, tmp_path, draft_tokens=3)
    assert run(batch, first) | run(batch, second) == wanted
    proposer = batch.executor.proposer
    # Nearly each: random weights have ties, which passes of other sizes round in other ways.
    assert proposer.accepted_tokens >= 0.9 * proposer.proposed_tokens > TOKENS
    # Sampled tokens often differ from its guesses, and the greedy ones that follow tell whether it went back rightly.
    hot = dataclasses.replace(first, sampling=SamplingParams(temperature=1.0, seed=4))
    wanted = run(plain, hot)
    assert run(batch, hot) == wanted


@pytest.mark.parametrize("name", ["mamba2", "gemma3_text"])
def test_what_is_kept_fits_the_memory_proof(name: str) -> None:
    caches = Late("mlx_lm.models.cache")
    shape, model = geometry(config_of(name)), build(config_of(name))
    layers = caches.make_prompt_cache(model)
    model(Late("mlx.core").zeros((1, 300), dtype=Late("mlx.core").int32), cache=layers)
    load_ = ServingLoad(context_length=512, concurrency=4, draft_tokens=3)
    for by_token in (False, True):
        way_back = Late("engine.cache.rollback").Rollback(layers, by_token=by_token)
        kept = sum(
            array.nbytes
            for _, array in Late("mlx.utils").tree_flatten(list(way_back._states.values()))
            if hasattr(array, "nbytes")
        )
        assert kept <= footprint.kept_bytes(shape, load_, by_token=by_token)
        assert bool(kept) == (by_token or name == "mamba2")
