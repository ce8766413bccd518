"""Times of passes over one token and over guesses, and whether a guess is worth its pass. Times arrive as arguments."""

from dataclasses import dataclass, field
from typing import Final

# A guess must promise this much more than passes of one token: averages lag behind.
_MARGIN: Final = 1.15
_WEIGHT: Final = 0.1
_GUESS_WEIGHT: Final = 0.3
FEW_SAMPLES: Final = 3
"""Times of a pass of which none is believed alone."""
# A pass that took longer than this many usual ones was interrupted, for example by a piece of a prompt.
_ODD: Final = 4.0
# A time that was not measured for this many tokens is measured again.
_STALE_TOKENS: Final = 2_000


@dataclass(slots=True, kw_only=True)
class PassTimes:
    """The time of a pass by the number of guesses in it."""

    tokens: int = 0
    """Tokens that all sequences made so far."""
    plain_s: float = 0.0
    """Time of a pass over one token; 0 before the first one."""
    samples: dict[int, int] = field(default_factory=dict)
    """Times that were measured, by the number of guesses."""
    _guess_s: dict[int, float] = field(default_factory=dict)
    _measured_at: dict[int, int] = field(default_factory=dict)
    _step: tuple[int, int] | None = None
    """(guessed tokens, passes for one more token) of the step whose time is not known yet."""

    def note_step(self, guessed: int, *, passes: int) -> None:
        """Note a step; its time follows.

        `passes` are those of the step that made one token each: one that it waited for, and one after wrong guesses that
        read the right ones again.
        """
        self._step = guessed, passes

    def drop_step(self) -> None:
        """Forget the step: its time will say nothing of others."""
        self._step = None

    def record(self, seconds: float) -> None:
        """Note the time of the last step, if it was noted."""
        if self._step is None:
            return
        (count, passes), self._step = self._step, None
        if count:
            # What a pass takes longer because of tokens that it reads again is a cost of the guess.
            spent = seconds - passes * self.plain_s
            old, samples = self._guess_s.get(count, spent), self.samples.get(count, 0)
            # Of the first ones the shortest counts: whatever else the machine does only makes them longer.
            is_early = samples < FEW_SAMPLES
            self._guess_s[count] = (
                min(old, spent) if is_early else old + _GUESS_WEIGHT * (spent - old)
            )
            self.samples[count] = samples + 1
            self._measured_at[count] = self.tokens
        elif passes:
            # Passes overlap: the step began one, and waited for the one before.
            if not self.plain_s:
                self.plain_s = seconds
            elif seconds < _ODD * self.plain_s:
                self.plain_s += _WEIGHT * (seconds - self.plain_s)

    def profit(self, count: int, expected: float) -> float:
        """Return how many times the tokens a second of plain passes a guess promises; 0 if it does not pay.

        Of `count` guessed tokens `expected` are right. A pass whose time is not known promises what the guess is worth
        if half of it must be right.
        """
        if count < 1 or not self.plain_s:
            return 0.0
        gain = 1 + expected
        if self.tokens - self._measured_at.get(count, -_STALE_TOKENS) >= _STALE_TOKENS:
            # Find out where the guess is likely to be right.
            return gain if gain > 1 + count / 2 else 0.0
        found = gain * self.plain_s / self._guess_s[count] if self._guess_s[count] > 0 else gain
        return found if found > _MARGIN else 0.0
