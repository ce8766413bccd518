"""Guesses from earlier text: what is guessed, and when a guess pays."""

import random
from collections.abc import Sequence

import pytest

from engine.batch.ngram import NgramProposer
from engine.batch.speculative import TokenSequence

PLAIN_S = 0.01


def sequence(prompt: Sequence[int], outputs: Sequence[int] = (), job_id: int = 1) -> TokenSequence:
    return TokenSequence(job_id, prompt, outputs)


def measured(count: int = 8, guess_s: float = PLAIN_S) -> NgramProposer:
    """Return a proposer that knows the times of its passes."""
    proposer = NgramProposer(count=count)
    proposer.note_step(0, accepted=0, passes=1)
    proposer.record_time(PLAIN_S)
    for size in range(1, count + 1):
        proposer.note_step(size, accepted=0, passes=0)
        proposer.record_time(guess_s)
    return proposer


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [6, 7, 8, 9]),
        ([1, 2, 3, 4, 9, 0, 8, 0, 1, 2, 3, 4, 7, 7, 7, 1, 2, 3, 4], [7, 7, 7, 1]),
        ([9, 5, 6, 7, 5, 6, 7, 5, 6, 7], [5, 6, 7, 5]),
        ([5, 5, 5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4, 5, 6], []),
        ([1, 2, 8, 1, 2], []),
        ([1], []),
        ([], []),
    ],
    ids=["a copy", "the latest place", "a period", "one token", "new", "too short", "one", "none"],
)
def test_what_followed_the_last_tokens_before_is_guessed(text: list[int], guess: list[int]) -> None:
    proposer = measured(count=4)
    proposer._right = [1.0] * 5
    assert proposer.propose(sequence(text), 9) == guess
    assert proposer.propose(sequence(text), 2) == guess[:2]
    assert proposer.propose(sequence(text), 0) == []
    split = measured(count=4)
    split._right = [1.0] * 5
    for end in range(2, len(text) + 1):  # the same, as the tokens arrive
        split.is_promising(sequence(text[:2], text[2:end]), 9)
    assert split.propose(sequence(text[:2], text[2:]), 9) == guess


def test_another_sequence_has_no_places_of_the_last_one() -> None:
    proposer = measured(count=4)
    proposer._right = [1.0] * 5
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    assert proposer.propose(sequence(text), 4)
    assert proposer.propose(sequence([1, 2, 3], job_id=2), 4) == []


def follow(proposer: NgramProposer, text: Sequence[int], guess_s: float) -> float:
    """Generate a text of which 100 tokens are the prompt; return the seconds that it takes."""
    prompt, spent, at = text[:100], 0.0, 100
    made: list[int] = []
    while at < len(text):
        guess = proposer.propose(sequence(prompt, made), len(text) - at - 1)
        right = 0
        while right < len(guess) and guess[right] == text[at + right]:
            right += 1
        seconds = guess_s if guess else PLAIN_S
        proposer.note_step(len(guess), accepted=right, passes=int(not guess))
        proposer.record_time(seconds)
        spent += seconds
        made += text[at : at + right + 1]
        at += right + 1
        proposer.is_promising(sequence(prompt, made), 8)
    return spent


def numbers(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize("factor", [1.1, 2.8])
def test_a_copy_is_generated_in_less_time(factor: float) -> None:
    """With passes as on a GPU, and as on a CPU; nothing is known at first."""
    text = numbers(1, 800)
    proposer = NgramProposer(count=8)
    spent = follow(proposer, [*text, *text], factor * PLAIN_S)
    assert spent < 800 * PLAIN_S + 700 * PLAIN_S / 2
    assert proposer.accepted_tokens > 0.8 * 700


def broken(seed: int, every: int) -> list[int]:
    """Return a text of 10,000 tokens in which each piece repeats an earlier one for `every` tokens at most."""
    dice = random.Random(seed)
    text = numbers(seed, 200)
    while len(text) < 10_000:
        at = dice.randrange(len(text) - every)
        text += [*text[at : at + every], dice.randrange(1000)]
    return text


@pytest.mark.parametrize("factor", [1.1, 2.8, 8.0])
@pytest.mark.parametrize(
    "every", [3, 7, 20, *(pytest.param(every, marks=pytest.mark.ci) for every in (4, 5, 10))]
)
def test_guesses_cost_at_most_two_percent(factor: float, every: int) -> None:
    text = broken(every, every)
    spent = follow(NgramProposer(count=8), text, factor * PLAIN_S)
    assert spent <= (len(text) - 100) * PLAIN_S / 0.98


def test_a_pass_that_was_interrupted_is_not_the_usual_one() -> None:
    proposer = measured()
    for _ in range(20):
        proposer.note_step(0, accepted=0, passes=1)
        proposer.record_time(50 * PLAIN_S)
    assert proposer.times.plain_s == PLAIN_S
