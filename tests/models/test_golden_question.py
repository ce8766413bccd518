"""The check of a golden answer detects garbage with a valid form."""

import math
from typing import Any

import pytest

from models import golden_question
from schemas.formation import GoldenAnswer

RIGHT = GoldenAnswer(pieces=("a", "b"), logprobs=(-0.5, -1.0))


def answer(pieces: tuple[str, ...], *logprobs: float) -> GoldenAnswer:
    return GoldenAnswer(pieces=pieces, logprobs=logprobs)


@pytest.mark.parametrize(("given", "words"), [
    (RIGHT, ""),
    (answer(("a", "b"), -0.54, -0.96), ""),
    (answer(("a", "b"), -0.5, -1.06), "token 2 of the golden answer has the logprob -1.060"),
    (answer(("a", "b"), math.nan, -1.0), "token 1 of the golden answer has the logprob nan"),
    (answer(("a", "c"), -0.5, -1.0), "token 2 of the golden answer is 'c', and"),
    (answer(("a",), -0.5), "has 1 tokens, and that of an earlier epoch has 2"),
    (answer((), *()), "has 0 tokens"),
])  # fmt: skip
def test_an_answer_against_another(given: GoldenAnswer, words: str) -> None:
    said = golden_question.mismatch(given, RIGHT)
    assert (said == "") == (words == "")
    assert words in said


def test_the_source_of_the_expected_answer_is_named() -> None:
    reference = RIGHT.model_copy(update={"is_reference": True})
    assert "one Mac alone" in golden_question.mismatch(answer(("x", "b"), -0.5, -1.0), reference)


@pytest.mark.parametrize(("given", "is_sane"), [
    (RIGHT, True), (answer((), *()), False),
    (answer(("a", "b"), -0.5, math.nan), False),
    (answer(("a", "b"), -0.5, -math.inf), False),
    (answer(("a", "b"), -0.5, -0.5), False),
])  # fmt: skip
def test_an_answer_without_another_has_to_be_sane(given: GoldenAnswer, *, is_sane: bool) -> None:
    assert (golden_question.mismatch(given, None) == "") == is_sane


@pytest.mark.parametrize(("logprobs", "complaint"), [
    ((-1.0, -2.0), ""), ((-1.0,), ""), ((), "no tokens"),
    ((-1.0, -9999.0), "no probability"),
    ((-1.0, float("nan")), "no probability"),
    ((-6.2, -6.2, -6.2), "equally likely"),
])  # fmt: skip
def test_answer_of_a_broken_model_is_refused(logprobs: tuple[float, ...], complaint: str) -> None:
    found = golden_question.sanity_error(
        GoldenAnswer(pieces=("a",) * len(logprobs), logprobs=logprobs)
    )
    assert complaint in found
    assert bool(complaint) == bool(found)


@pytest.mark.parametrize(
    "response", [{}, {"choices": []}, {"choices": [{"logprobs": None}]}, {"error": "x"}]
)
def test_an_invalid_response_is_refused(response: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="golden question is invalid"):
        golden_question.read_answer(response, is_reference=False)
