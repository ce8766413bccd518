"""The prompts that the engine took last, for an engine that takes over its requests. Event loop only.

The prefix cache itself cannot move: keys and values are thousands of times larger than tokens.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from engine.jobs import Job
from schemas.wire.recent_prompts import (
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_TOKENS,
    RecentPrompt,
    RecentPrompts,
)

# A shorter beginning is read faster than it is looked up.
_MIN_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class _Prompt:
    salt: str
    tokens: tuple[int, ...]

    def begins(self, other: "_Prompt") -> bool:
        """Return whether the other prompt begins with this one."""
        count = len(self.tokens)
        if self.salt != other.salt or count > len(other.tokens):
            return False
        # Most pairs differ at this token; only the others are compared as a whole.
        is_likely = self.tokens[-1] == other.tokens[count - 1]
        return is_likely and self.tokens == other.tokens[:count]


@dataclass(slots=True)
class PromptHistory:
    """Beginnings of prompts within a budget of tokens; of a conversation only its last turn."""

    _prompts: deque[_Prompt] = field(default_factory=deque)
    """Newest first."""
    _tokens: int = 0

    def add(self, jobs: Iterable[Job]) -> None:
        """Add the prompts of a request; the oldest ones leave."""
        for job in jobs:
            # Whoever takes over reads prompts with the model alone.
            is_plain = not job.adapter and not job.images
            if len(job.prompt) >= _MIN_TOKENS and is_plain:
                new = _Prompt(job.cache_salt, tuple(job.prompt[:MAX_PROMPT_TOKENS]))
                covering = next((prompt for prompt in self._prompts if new.begins(prompt)), new)
                self._prompts = deque(
                    prompt for prompt in self._prompts if not prompt.begins(covering)
                )
                self._prompts.appendleft(covering)
                self._tokens = sum(len(prompt.tokens) for prompt in self._prompts)
                while len(self._prompts) > MAX_PROMPTS or self._tokens > MAX_TOKENS:
                    self._tokens -= len(self._prompts.pop().tokens)

    def report(self) -> RecentPrompts:
        """Return the prompts, newest first."""
        return RecentPrompts(
            prompts=tuple(
                RecentPrompt(salt=prompt.salt, tokens=prompt.tokens) for prompt in self._prompts
            )
        )
