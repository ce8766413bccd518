"""The golden question: a request that a group must answer correctly before it serves, and the check of its answer. Pure.

It detects silent garbage: an answer with valid form and wrong tokens, as a wrong split of the model produces.
"""

import math
from typing import Any, TypeAlias

from schemas.formation import GoldenAnswer

Json: TypeAlias = dict[str, Any]

# Every model continues such text the same way on every rank; a wrong split shows in the first tokens.
PATH = "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four,"
MAX_TOKENS = 16

# The API writes this in place of minus infinity (engine/openai/response_body.py).
_NO_PROBABILITY = -9999.0
# In nats. Sums among ranks have another order: they differ by 1e-5 in 32 bits and by a hundredth in 16 bits. A wrong
# split, or a transfer that failed unnoticed (mlx PR #3152), differs by whole nats.
_LOGPROB_TOLERANCE = 0.05


def request_body(model: str) -> Json:
    """Return the body of the request to the engine's own API."""
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": 0,
    }


def read_answer(response: Json, *, is_reference: bool) -> GoldenAnswer:
    """Return the answer in the engine's response to `request_body`.

    Raises:
        ValueError: the response has another form.

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
            f"the engine's response to the golden question is invalid: {error!r}"
        ) from error


def sanity_error(answer: GoldenAnswer) -> str:
    """Return why no sound model gives this answer; "" if one can."""
    if not answer.pieces:
        return "the answer has no tokens"
    if not all(math.isfinite(logprob) and logprob > _NO_PROBABILITY for logprob in answer.logprobs):
        return "a token of the answer has no probability: the weights or the sums among ranks are broken"
    if len(answer.logprobs) > 1 and len(set(answer.logprobs)) == 1:
        return "all tokens of the answer are equally likely: the weights or the sums among ranks are broken"
    return ""


def mismatch(answer: GoldenAnswer, expected: GoldenAnswer | None) -> str:
    """Return how an answer differs from the expected one, "" if it does not; without one it must only be sane."""
    if expected is None:
        return sanity_error(answer)
    source = "one Mac alone" if expected.is_reference else "an earlier epoch"
    pairs = zip(answer.pieces, expected.pieces, strict=False)
    for number, (piece, wanted) in enumerate(pairs, 1):
        if piece != wanted:
            return f"token {number} of the golden answer is {piece!r}, and {source} gave {wanted!r}"
    if len(answer.pieces) != len(expected.pieces):
        return (
            f"the golden answer has {len(answer.pieces)} tokens, and that of {source} has "
            f"{len(expected.pieces)}"
        )
    both = zip(answer.logprobs, expected.logprobs, strict=False)
    for number, (logprob, other) in enumerate(both, 1):
        # Written so that NaN counts as too far.
        if not math.fabs(logprob - other) <= _LOGPROB_TOLERANCE:
            return (
                f"token {number} of the golden answer has the logprob {logprob:.3f}, and {source} gave it {other:.3f}: "
                f"more than {_LOGPROB_TOLERANCE} apart"
            )
    return ""
