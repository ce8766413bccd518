"""Speculation with the model's own multi-token prediction (MTP) head. Worker thread only.

The head reads a token with the hidden state of the one before it, in a layer with a KV cache of its own, and guesses
the token after it; from its own hidden states it guesses further. Nothing shows without a guess whether it would have
been right, so a head that does not pay is tried again from time to time. Times arrive as arguments.
"""

from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from engine.batch.hidden_states import HiddenStates
from engine.batch.pass_times import FEW_SAMPLES, PassTimes
from engine.batch.speculative import TokenSequence
from engine.cache.interface import LayerCache

Head: TypeAlias = Any  # an engine.model.mtp_head.MtpHead

# The share of right guesses that is expected of a head that was never tried.
_FIRST_SHARE: Final = 0.7
_WEIGHT: Final = 0.05
# Tokens after which a head that does not pay is tried again: twice as many after each trial that fails.
_FIRST_PAUSE: Final = 100
_LONGEST_PAUSE: Final = 1_600
_TRIAL_GUESSES: Final = 8
# A guess before which the head reads more tokens than this takes longer than those that follow.
_USUAL_READ: Final = 32


@dataclass(slots=True, kw_only=True)
class GuessPolicy:
    """Decides how many tokens a head guesses, from the times of passes and the share of its guesses that were right."""

    count: int
    """Most tokens to guess at once."""
    times: PassTimes = field(default_factory=PassTimes)
    """Times of passes, with and without guesses."""
    _right: list[float] = field(default_factory=list)
    """Share of right guesses at each place, of those whose predecessors were right."""
    _pause: int = _FIRST_PAUSE
    _tried_at: int = 0
    """Tokens of all sequences when guesses last paid or were tried."""
    _trials: int = 0
    """Guesses that are left of a trial, which are made although they do not seem to pay."""
    _trials_right: int = 0

    def __post_init__(self) -> None:
        """Expect the same of all places."""
        self._right = [_FIRST_SHARE] * self.count

    @property
    def pays(self) -> bool:
        """Return whether guesses promise more tokens a second than passes of one token."""
        return self._best_count(self.count) > 0

    def begin_step(self) -> None:
        """Start a trial if guesses have not paid for long."""
        if self.pays:
            self._tried_at, self._pause, self._trials = self.times.tokens, _FIRST_PAUSE, 0
        elif self._may_pay and self.times.tokens - self._tried_at >= self._pause:
            self._trials, self._trials_right = _TRIAL_GUESSES, 0
            self._tried_at = self.times.tokens
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def choose(self, most: int) -> int:
        """Return how many tokens to guess, at most `most`; 0 if none."""
        trial = min(1, most, self._trials) if self._may_pay else 0
        return self._best_count(most) or max(0, trial)

    def note_step(self, proposed: int, *, accepted: int, passes: int) -> None:
        """Learn from a step; its time follows."""
        self.times.tokens += accepted + 1
        if proposed and self._trials:
            self._trials -= 1
            self._trials_right += accepted > 0
            if not self._trials:
                self._right = [self._trials_right / _TRIAL_GUESSES] * self.count
        for place in range(min(proposed, accepted + 1)):
            is_right = place < accepted
            self._right[place] += _WEIGHT * (is_right - self._right[place])
        self.times.note_step(proposed, passes=passes)

    @property
    def _may_pay(self) -> bool:
        """Return whether a guess would pay if it were right, or its time is hardly known."""
        is_known = self.times.samples.get(1, 0) >= FEW_SAMPLES
        return bool(self.times.plain_s) and (not is_known or self.times.profit(1, 1.0) > 0)

    def _best_count(self, most: int) -> int:
        """Return how many guesses promise the most tokens a second; 0 if none pay."""
        best, best_profit, expected, chance = 0, 0.0, 0.0, 1.0
        for place, share in enumerate(self._right[: max(0, most)]):
            chance *= share
            expected += chance
            profit = self.times.profit(place + 1, expected)
            if profit > best_profit:
                best, best_profit = place + 1, profit
        return best


@dataclass(slots=True, kw_only=True)
class MtpProposer:
    """Proposes tokens of the only running sequence."""

    head: Head
    states: HiddenStates
    policy: GuessPolicy
    proposed_tokens: int = 0
    """Tokens proposed so far."""
    accepted_tokens: int = 0
    """Those that the model would have chosen itself."""
    _job_id: int = -1
    _read: int = 0
    """Position of the first hidden state that the head has not read."""
    _cache: LayerCache = field(default_factory=lambda: _new_cache())
    _is_usual: bool = True
    """False if the last guess read many tokens first."""

    def is_promising(self, sequence: TokenSequence, most: int) -> bool:
        """Return whether a guess of at most `most` tokens is likely to pay, or shall be tried."""
        del sequence
        self.policy.begin_step()
        self.states.is_wanted = self.policy.pays
        return self.policy.choose(most) > 0

    def propose(self, sequence: TokenSequence, most: int) -> list[int]:
        """Return at most `most` tokens that may follow; none if they promise nothing, or no hidden state is known."""
        count = self.policy.choose(most)
        if not count or not self._find_cache(sequence):
            return []
        found = self._guess(sequence, count)
        self.proposed_tokens += len(found)
        return found

    def note_step(self, proposed: int, *, accepted: int, passes: int) -> None:
        """Learn from a step; its time follows."""
        self.accepted_tokens += accepted
        self.policy.note_step(proposed, accepted=accepted, passes=passes)
        if not self._is_usual:
            self.policy.times.drop_step()
        self._is_usual = True

    def record_time(self, seconds: float) -> None:
        """Note the time of the last step."""
        self.policy.times.record(seconds)

    def _find_cache(self, sequence: TokenSequence) -> bool:
        """Make the cache hold the sequence up to `_read`; return whether the states after it are known."""
        # The state of the last token is not known: the model has not read it.
        end = len(sequence.prompt) + len(sequence.outputs) - 1
        if sequence.job_id != self._job_id or self._read >= end:
            self._job_id, self._read, self._cache = sequence.job_id, 0, _new_cache()
        found = self.states.since(sequence.job_id, self._read)
        if found is None or found[0] + found[1].shape[0] != end:
            return False
        if found[0] != self._read:
            self._read, self._cache = found[0], _new_cache()
        return True

    def _guess(self, sequence: TokenSequence, count: int) -> list[int]:
        found = self.states.since(sequence.job_id, self._read)
        assert found is not None, "`_find_cache` found it"
        start, hidden = found
        self._is_usual = hidden.shape[0] <= _USUAL_READ
        self._read = start + hidden.shape[0]
        tokens = mx.array([sequence.since(start + 1)])
        hidden = hidden[None]
        arrays: list[Any] = []
        for _ in range(count):
            hidden = self.head(hidden, self.states.embed(tokens), self._cache)[:, -1:]
            tokens = mx.argmax(self.states.logits(hidden), axis=-1)
            arrays.append(tokens)
        guesses = cast("list[int]", mx.concatenate(arrays, axis=1)[0].tolist())
        # What the head read of itself is read again with the model's states.
        self._cache.trim(count - 1)
        return guesses


def _new_cache() -> LayerCache:
    return KVCache()  # type: ignore[no-untyped-call] # mlx-lm ships no types
