"""Guesses for models with recurrent states and windows: answers stay the same, whatever part of a guess is right."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_batches import drain, job, load, new_batch, tokens
from tests.support.mlx_models import Late
from tests.support.model_families import save

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]
mlx_lm: Any = Late("mlx_lm")

# A state and a window.
QUICK = ("mamba2", "gemma3_text")
OTHERS = ("qwen3_next", "qwen3_5", "kimi_linear", "nemotron_h", "jamba", "lfm2", "gpt_oss", "gemma4_text", "cohere2")  # fmt: skip
TOKENS = 140
"""More than the windows of these models, with a prompt of 30 tokens."""


class Proposer:
    """Proposes what the answers are known to say, with wrong tokens at random places."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers, self._dice = answers, random.Random(3)
        self.proposed_tokens = self.accepted_tokens = 0
        self.rejections: set[tuple[int, int]] = set()
        """(proposed tokens, right ones) of guesses that were partly wrong."""

    def is_promising(self, sequence: Any, most: int) -> bool:
        del sequence
        return most > 0

    def propose(self, sequence: Any, most: int) -> list[int]:
        start = len(sequence.outputs)
        guess = self._answers[sequence.job_id][
            start : start + min(most, self._dice.randrange(1, 5))
        ]
        wrong = self._dice.randrange(6)
        guess[wrong : wrong + 1] = [(token + 1) % 500 for token in guess[wrong : wrong + 1]]
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
    first = job(0, prompt_of(30), max_tokens=TOKENS, top_logprobs=1)
    plain.add(first)
    wanted = drain(plain)[0]
    proposer = Proposer({0: tokens(wanted)})
    batch = guessing(loaded, tmp_path, proposer)
    batch.add(first)
    made = drain(batch)[0]
    assert tokens(made) == tokens(wanted)
    assert logprobs_of(made) == scores(wanted)
    assert len(proposer.rejections) >= 6, "rejected after each number of right tokens"
    # What it left in the prefix cache is right, and reaches to its last token but one.
    turn = [*first.prompt, *tokens(wanted), *prompt_of(9, seed=6)]
    again = job(1, turn, max_tokens=8, top_logprobs=1)
    fresh = new_batch(loaded, tmp_path)
    fresh.add(again)
    wanted = drain(fresh)[1]
    batch.executor.proposer = None
    batch.executor.decode_stage = batch.executor._new_decode_stage()
    batch.add(again)
    made = drain(batch)[1]
    assert made[0].cached_tokens >= len(first.prompt) + TOKENS - 1
    assert logprobs_of(made) == scores(wanted)
