"""What one step does, as data: rank 0 decides it, every rank of a group does it. Pure; no mlx.

Nothing here or in what carries it out may depend on a clock or on chance: ranks that did the same plans in
the same order hold the same sequences, the same caches and the same tokens.
"""

import sys
from dataclasses import dataclass

from engine.jobs import Job

# Tokens of prompts read in one go while nobody waits for a token. On a GPU mlx-lm's own default; a CPU reads some
# 200 tokens/s, and is not faster with more. The memory proof knows them (models/model_files.py).
LARGEST_CHUNK = 512 if sys.platform == "linux" else 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """The next piece of a job's prompt."""

    job_id: int
    count: int
    """Tokens; 0 where all but the last are in the prefix cache."""
    is_last: bool
    """Whether the prompt is read to its end, and generates from the next step on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step."""

    joins: tuple[Job, ...] = ()
    leaves: tuple[int, ...] = ()
    decodes: bool = False
    """Whether every sequence that generates makes one more token (or several, with a draft)."""
    chunks: tuple[PromptChunk, ...] = ()
    """Pieces of prompts to read together. Several only if each is the last of its prompt."""
    prefix_bytes: int | None = None
    """Trim the prefix cache to this first."""
    clears: bool = False
    """Return MLX's unused buffers to the system."""
