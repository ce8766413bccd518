"""The golden question: what is asked of a group before it serves, and how its answer is read. Pure; no mlx here.

Whether a group's answer to the golden question is right: against silent garbage, which looks like an answer. Pure.
"""

import math
from typing import Any, TypeAlias

from schemas.formation import GoldenAnswer

Json: TypeAlias = dict[str, Any]

# Text that every model has seen goes on alike on every rank, or not at all: a wrong split shows in the first tokens.
PATH = "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four,"
MAX_TOKENS = 16


def request_body(model: str) -> Json:
    """Return the request, for the engine's own API."""
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": 0,
    }


def read_answer(response: Json, *, is_reference: bool) -> GoldenAnswer:
    """Return what the engine's response to `body` says.

    Raises:
        ValueError: it is no such response.

    """
    try:
        found = response["choices"][0]["logprobs"]
        pieces, logprobs = found["tokens"], found["token_logprobs"]
        return GoldenAnswer(
            pieces=tuple(str(piece) for piece in pieces),
            logprobs=tuple(float(logprob) for logprob in logprobs),
            is_reference=is_reference,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the engine's answer to the golden question is none: {error!r}"
        ) from error


def sanity_error(answer: GoldenAnswer) -> str:
    """Say why an answer without a reference cannot be one of a sound model; "" if it can."""
    if not answer.pieces:
        return "the answer has no tokens"
    if not all(math.isfinite(logprob) and logprob > _NO_PROBABILITY for logprob in answer.logprobs):
        return "a token of the answer has no probability: the weights or the sums among ranks are broken"
    if len(answer.logprobs) > 1 and len(set(answer.logprobs)) == 1:
        return "all tokens of the answer are equally likely: the weights or the sums among ranks are broken"
    return ""


# What the API says in place of minus infinity (openai/logprobs.py).
_NO_PROBABILITY = -9999.0


# In nats. Sums among ranks are made in another order: 1e-5 apart in 32 bits, a hundredth in 16. A wrong split or a
# transfer that failed unnoticed (mlx PR #3152) is off by whole nats.
_LOGPROB_TOLERANCE = 0.05


def mismatch(answer: GoldenAnswer, expected: GoldenAnswer | None) -> str:
    """Return what is wrong with an answer; "" if nothing is. Without a reference it only has to be sane."""
    if expected is None:
        return sanity_error(answer)
    whose = "one Mac alone" if expected.is_reference else "an earlier epoch"
    pairs = zip(answer.pieces, expected.pieces, strict=False)
    for number, (piece, wanted) in enumerate(pairs, 1):
        if piece != wanted:
            return f"token {number} of the golden answer is {piece!r}, and {whose} made {wanted!r}"
    if len(answer.pieces) != len(expected.pieces):
        return f"the golden answer has {len(answer.pieces)} tokens, and that of {whose} has {len(expected.pieces)}"
    both = zip(answer.logprobs, expected.logprobs, strict=False)
    for number, (logprob, other) in enumerate(both, 1):
        # Written so that what is no number is too far.
        if not math.fabs(logprob - other) <= _LOGPROB_TOLERANCE:
            return (
                f"token {number} of the golden answer has the logprob {logprob:.3f}, and {whose} gave it {other:.3f}: "
                f"more than {_LOGPROB_TOLERANCE} apart"
            )
    return ""
