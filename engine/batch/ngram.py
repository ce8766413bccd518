"""Speculation without a draft model: what followed the last tokens before follows them again (prompt lookup).

Answers that repeat their prompt (edits of code, summaries, extracts) are guessed in long pieces. A guess costs a pass
over several tokens in place of one, so it is only made where it pays:
- The longer the match with an earlier place, the likelier the guess. How many tokens matches of each length guessed
  right is counted for every token, whether or not a guess was made, so this evidence costs nothing.
- The times of passes are measured. A guess must promise more tokens a second than passes of one token.

Times arrive as arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.batch.pass_times import PassTimes
from engine.batch.speculative import TokenSequence

# A match of fewer tokens is chance.
_LEAST_MATCH: Final = 3
_LONGEST_MATCH: Final = 32
# Upper ends of the classes of matches by length.
_CLASSES: Final = (3, 5, 8, 15, _LONGEST_MATCH)
_WEIGHT: Final = 0.1


@dataclass(slots=True, kw_only=True)
class _Forecast:
    """Tokens that would follow at one place, to be compared with those that do."""

    end: int
    """Number of tokens of the sequence when it was made."""
    kind: int
    """Class of the match."""
    tokens: list[int]


@dataclass(slots=True, kw_only=True)
class NgramProposer:
    """Proposes tokens of the only running sequence."""

    count: int
    """Most tokens to propose at once."""
    proposed_tokens: int = 0
    """Tokens proposed so far."""
    accepted_tokens: int = 0
    """Those that the model would have chosen itself."""
    _job_id: int = -1
    _tokens: list[int] = field(default_factory=list)
    """The tokens that are indexed."""
    _places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """End of the latest place of an n-gram, by the n-gram; the one at the very end of the text is not in it yet."""
    _right: list[float] = field(default_factory=lambda: [0.0, 0.2, 0.5, 0.7, 0.8])
    """Share of a full guess that was right, a moving average by class of match."""
    _forecast: _Forecast | None = None
    times: PassTimes = field(default_factory=PassTimes)
    """The cost of passes, with and without guesses."""

    def is_promising(self, sequence: TokenSequence, most: int) -> bool:
        """Return whether a guess of at most `most` tokens is likely to pay; learns from the tokens in any case."""
        self._read(sequence)
        found = self._match()
        if found is None:
            return False
        kind, guess = found
        if self._forecast is None:
            self._forecast = _Forecast(end=len(self._tokens), kind=kind, tokens=guess)
        return self._pays(kind, min(len(guess), most))

    def propose(self, sequence: TokenSequence, most: int) -> list[int]:
        """Return at most `most` tokens that may follow; none if they promise nothing."""
        self._read(sequence)
        found = self._match()
        if found is None:
            return []
        kind, guess = found
        guess = guess[:most]
        if not self._pays(kind, len(guess)):
            return []
        self.proposed_tokens += len(guess)
        return guess

    def note_step(self, proposed: int, *, accepted: int, passes: int) -> None:
        """Note a step; its time follows."""
        self.accepted_tokens += accepted
        self.times.note_step(proposed, passes=passes)

    def record_time(self, seconds: float) -> None:
        """Note the time of the last step."""
        self.times.record(seconds)

    def _pays(self, kind: int, count: int) -> bool:
        return self.times.profit(count, self._right[kind] * count) > 0

    def _read(self, sequence: TokenSequence) -> None:
        """Index the tokens that are new, and judge the forecast by them."""
        count = len(sequence.prompt) + len(sequence.outputs)
        if sequence.job_id != self._job_id or count < len(self._tokens):
            self._job_id, self._forecast = sequence.job_id, None
            self._tokens, self._places = [], {}
            self._add(sequence.prompt)
        new = sequence.outputs[len(self._tokens) - len(sequence.prompt) :]
        self._add(new)
        self.times.tokens += len(new)
        self._judge()

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            if end >= _LEAST_MATCH:
                self._places[tuple(self._tokens[end - _LEAST_MATCH :])] = end
            self._tokens.append(token)

    def _judge(self) -> None:
        forecast = self._forecast
        if forecast is None:
            return
        actual = self._tokens[forecast.end : forecast.end + len(forecast.tokens)]
        right = 0
        while right < len(actual) and actual[right] == forecast.tokens[right]:
            right += 1
        if right == len(actual) < len(forecast.tokens):
            return  # not known yet
        share = right / len(forecast.tokens)
        self._right[forecast.kind] += _WEIGHT * (share - self._right[forecast.kind])
        self._forecast = None

    def _match(self) -> tuple[int, list[int]] | None:
        """Return the class of the match of the last tokens with an earlier place, and what followed there."""
        tokens = self._tokens
        end = self._places.get(tuple(tokens[-_LEAST_MATCH:]))
        if end is None:
            return None
        length, most = _LEAST_MATCH, min(_LONGEST_MATCH, end)
        while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        kind = next(at for at, longest in enumerate(_CLASSES) if length <= longest)
        guess = tokens[end : end + self.count]
        # A text that repeats itself with a short period goes on beyond its end.
        period = len(tokens) - end
        while len(guess) < self.count:
            guess.append(guess[len(guess) - period])
        return kind, guess
