"""Speculative decoding: tokens are proposed that the model checks in one pass. Worker thread only.

They come from a draft model (here) or from earlier places of the same text (ngram.py). A proposed token is accepted only if it is the token that the model itself would choose at that index with that
index's random number (sampling.py). An answer is therefore the same with and without proposals, greedy or seeded; it
only comes sooner. Proposals are made while a single sequence runs: in a batch the device is busy anyway, and rows would
accept different numbers of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from engine.batch.step_plan import LARGEST_CHUNK
from engine.cache.batch_caches import set_reserved
from engine.cache.interface import KvOptions, LayerCache
from engine.cache.layer_caches import make_caches
from engine.cache.rollback import Rollback

Model: TypeAlias = Any  # mlx ships no types


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A running sequence: its tokens, and a name that no other one has."""

    job_id: int
    prompt: Sequence[int]
    outputs: Sequence[int]

    def since(self, position: int) -> Sequence[int]:
        """Return the tokens from a position on."""
        before = len(self.prompt)
        if position >= before:
            return self.outputs[position - before :]
        return [*self.prompt[position:], *self.outputs]


class TokenProposer(Protocol):
    """Proposes the next tokens of the only running sequence."""

    proposed_tokens: int
    """Tokens proposed so far."""
    accepted_tokens: int
    """Those that the model would have chosen itself."""

    def is_promising(self, sequence: TokenSequence, most: int) -> bool:
        """Return whether `propose` is worth waiting for the last token, which the sequence may lack."""
        ...

    def propose(self, sequence: TokenSequence, most: int) -> list[int]:
        """Return at most `most` tokens that may follow; none if a guess does not pay."""
        ...

    def note_step(self, proposed: int, *, accepted: int, passes: int) -> None:
        """Note a step of the sequence; `passes` are those of `PassTimes.note_step`."""
        ...

    def record_time(self, seconds: float) -> None:
        """Note the time of that step, if nothing else was done in it."""
        ...


@dataclass(slots=True, kw_only=True)
class DraftProposer:
    """A draft model, and the tokens it has read of the only running sequence."""

    model: Model
    count: int
    """Number of tokens to propose at once."""
    proposed_tokens: int = 0
    """Tokens proposed so far."""
    accepted_tokens: int = 0
    """Those that the model would have chosen itself."""
    _caches: list[LayerCache] = field(default_factory=list)
    _job_id: int = -1
    """The job whose sequence it read last."""
    _read: list[int] = field(default_factory=list)
    _known: int = 0
    """Tokens of `_read` that were in the text; the others were proposed."""
    _rollback: Rollback | None = None
    """The way back to them."""

    def is_promising(self, sequence: TokenSequence, most: int) -> bool:
        """Return True: a draft model is there to be used."""
        del sequence, most
        return True

    def note_step(self, proposed: int, *, accepted: int, passes: int) -> None:
        """Count the tokens that were right."""
        del proposed, passes
        self.accepted_tokens += accepted

    def record_time(self, seconds: float) -> None:
        """Ignore it."""

    def propose(self, sequence: TokenSequence, most: int) -> list[int]:
        """Return at most `most` tokens that may follow."""
        count = min(self.count, most)
        if count < 1:
            return []
        # A sequence only grows: what was read of the same one is not compared again.
        read, begin = self._read, self._known if sequence.job_id == self._job_id else 0
        known = begin
        for ours, theirs in zip(read[begin:], sequence.since(begin)[:-1], strict=False):
            if ours != theirs:
                break
            known += 1
        # If a pass fails, the layers have read different numbers of tokens: the next guess begins anew.
        self._job_id, self._read = -1, []
        if known < len(read) and self._rollback is not None:
            if known < self._known and self._rollback.rereads:
                known = 0
            else:
                rejected = len(read) - self._known
                known -= self._rollback.take_back(rejected, keep=known - self._known)
        if not known:
            self._caches = make_caches(self.model, KvOptions())
            set_reserved(self._caches, 0)  # the memory of a row counts both models in small steps
        *new, newest = sequence.since(known)
        for start in range(0, len(new), LARGEST_CHUNK):
            self.model(mx.array([new[start : start + LARGEST_CHUNK]]), cache=self._caches)
            mx.eval([cache.state for cache in self._caches])
        read[known:] = new
        self._known = len(read)
        self._rollback = Rollback(self._caches, by_token=True)
        last = mx.array([[newest]])
        arrays: list[Any] = []
        for _ in range(count):
            last = mx.argmax(self.model(last, cache=self._caches)[:, -1, :], axis=-1, keepdims=True)
            arrays.append(last)
            mx.async_eval(last)  # type: ignore[no-untyped-call] # mlx ships few types
        guesses = [int(array.item()) for array in arrays]
        read += [newest, *guesses[:-1]]
        self._job_id, self._read = sequence.job_id, read
        self.proposed_tokens += count
        return guesses
