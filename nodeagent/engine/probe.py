"""The golden question: what is asked of a group before it serves, and how its answer is read. Pure; no mlx here."""

import math
from typing import Any, TypeAlias

from schemas.formation import Golden

Json: TypeAlias = dict[str, Any]

# Text that every model has seen goes on alike on every rank, or not at all: a wrong split shows in the first tokens.
PATH = "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog. One, two, three, four,"
TOKENS = 16


def body(model: str) -> Json:
    """Return the request, for the engine's own API."""
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": 0,
    }


def golden(response: Json, *, is_reference: bool) -> Golden:
    """Return what the engine's response to `body` says.

    Raises:
        ValueError: it is no such response.

    """
    try:
        found = response["choices"][0]["logprobs"]
        pieces, logprobs = found["tokens"], found["token_logprobs"]
        return Golden(
            pieces=tuple(str(piece) for piece in pieces),
            logprobs=tuple(float(logprob) for logprob in logprobs),
            is_reference=is_reference,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the engine's answer to the golden question is none: {error!r}"
        ) from error


def insanity(answer: Golden) -> str:
    """Say why an answer without a reference cannot be one of a sound model; "" if it can."""
    if not answer.pieces:
        return "the answer has no tokens"
    if not all(math.isfinite(logprob) and logprob > _NEVER for logprob in answer.logprobs):
        return "a token of the answer has no probability: the weights or the sums among ranks are broken"
    if len(answer.logprobs) > 1 and len(set(answer.logprobs)) == 1:
        return "all tokens of the answer are equally likely: the weights or the sums among ranks are broken"
    return ""


# What the API says in place of minus infinity (openai/logprobs.py).
_NEVER = -9999.0
