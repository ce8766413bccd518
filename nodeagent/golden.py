"""Whether a group's answer to the golden question is right: against silent garbage, which looks like an answer. Pure."""

import math

from nodeagent.engine import probe
from schemas.formation import Golden

# In nats. Sums among ranks are made in another order: 1e-5 apart in 32 bits, a hundredth in 16. A wrong split or a
# transfer that failed unnoticed (mlx PR #3152) is off by whole nats.
_TOLERANCE = 0.05


def complaint(answer: Golden, expected: Golden | None) -> str:
    """Return what is wrong with an answer; "" if nothing is. Without a reference it only has to be sane."""
    if expected is None:
        return probe.insanity(answer)
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
        if not math.fabs(logprob - other) <= _TOLERANCE:
            return (
                f"token {number} of the golden answer has the logprob {logprob:.3f}, and {whose} gave it {other:.3f}: "
                f"more than {_TOLERANCE} apart"
            )
    return ""
