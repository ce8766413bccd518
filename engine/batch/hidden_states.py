"""Keeps the hidden states behind a model's logits, for a head that guesses from them (mtp.py). Worker thread only.

They belong to one sequence, the one that runs alone, and to its last tokens without a gap.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from engine.cache.interface import LayerCache
from models.footprint import MTP_KEPT_TOKENS

Array: TypeAlias = Any  # mlx ships no types
Model: TypeAlias = Any


class HiddenStates:
    """A model that is called as any other, and the hidden states of a sequence's last tokens."""

    def __init__(self, model: Model) -> None:
        """Wrap a model of mlx-lm: an inner model, and an output head or tied embeddings."""
        self.model = model
        self.is_wanted = True
        """True if prompts shall be kept, too, which costs the rest of the last layer."""
        self._next: tuple[int, int, int] | None = None
        """(job, position of the first kept token, tokens before it) of the next pass, if its states are kept."""
        self._job_id: int | None = None
        self._end = 0
        """Position after the last token that is kept."""
        self._pieces: deque[tuple[int, Array]] = deque()
        """(position of the first token, states) of consecutive tokens."""

    def __call__(self, tokens: Array, cache: list[LayerCache]) -> Array:
        """Return the logits, as the model does."""
        hidden = self.model.model(tokens, cache)
        if self._next is not None:
            (job_id, position, before), self._next = self._next, None
            states = hidden[0][before:]
            if job_id != self._job_id or position != self._end:
                self.clear()
                self._job_id = job_id
            count = states.shape[0]
            skipped = max(0, count - MTP_KEPT_TOKENS)
            self._pieces.append((position + skipped, states[skipped:]))
            self._end = position + count
            while self._end - self._pieces[0][0] > MTP_KEPT_TOKENS:
                self._pieces.popleft()
        return self.logits(hidden)

    def logits(self, hidden: Array) -> Array:
        """Return the logits of hidden states."""
        # The head of a model that may also see is within its language model.
        model: Model = getattr(self.model, "language_model", self.model)
        if hasattr(model, "lm_head"):
            return model.lm_head(hidden)
        return self.model.model.embed_tokens.as_linear(hidden)

    def embed(self, tokens: Array) -> Array:
        """Return the embeddings of tokens."""
        return self.model.model.embed_tokens(tokens)

    def keep_next(self, job_id: int, position: int, *, skipped: int = 0) -> None:
        """Keep the states of the next pass, which is one of this sequence alone, from the token of this position on.

        `skipped` are the tokens of the pass before it.
        """
        self._next = job_id, position, skipped

    def keep_next_prompt(self, job_id: int, position: int) -> bool:
        """Keep them, unless another sequence is generating or they are not wanted; return whether they are kept."""
        if not self.is_wanted or self._job_id not in (None, job_id):
            return False
        self.keep_next(job_id, position)
        return True

    def trim(self, count: int) -> None:
        """Drop the last tokens, which the caches dropped, too."""
        if count:
            position, states = self._pieces.pop()
            self._pieces.append((position, states[: states.shape[0] - count]))
            self._end -= count

    @property
    def newest(self) -> list[Array]:
        """The states of the last pass that was kept, to be evaluated with its caches."""
        return [self._pieces[-1][1]] if self._pieces else []

    def forget(self, job_ids: Sequence[int]) -> None:
        """Drop what is kept of these sequences."""
        if self._job_id in job_ids:
            self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self._job_id, self._end, self._next = None, 0, None
        self._pieces.clear()

    def since(self, job_id: int, position: int) -> tuple[int, Array] | None:
        """Return the states of a sequence's tokens from a position on; from a later one if those before are gone.

        Returns:
            The position of the first one and the states, shape (tokens, width); None if nothing is kept.

        """
        if job_id != self._job_id or position >= self._end:
            return None
        pieces = [piece for piece in self._pieces if piece[0] + piece[1].shape[0] > position]
        start = max(position, pieces[0][0])
        states = mx.concatenate([states for _, states in pieces])
        return start, states[start - pieces[0][0] :]
