"""The plan of one batch step, as data: rank 0 makes it, every rank of a group executes it. Pure; no mlx.

Neither a plan nor its execution may depend on a clock or on randomness. Ranks that execute the same plans in the
same order then hold the same sequences, caches and tokens.
"""

import sys
from dataclasses import dataclass

from engine.jobs import Job

# The most prompt tokens that one step reads while no sequence generates. On a GPU this is mlx-lm's default; a CPU
# reads about 200 tokens/s and gains nothing from larger pieces. The memory proof uses the same numbers
# (models/model_files.py).
LARGEST_CHUNK = 512 if sys.platform == "linux" else 2048
# A prompt in progress is stored in the prefix cache after this many tokens, for prompts that wait for the same beginning.
STORE_EVERY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """The next piece of a job's prompt."""

    job_id: int
    count: int
    """Number of tokens; 0 if the prefix cache holds all but the last one."""
    is_last: bool
    """True if the piece ends the prompt, so that the job generates from the next step on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one step. The field names are part of the protocol between ranks."""

    joins: tuple[Job, ...] = ()
    """Jobs that start to be read."""
    leaves: tuple[int, ...] = ()
    """IDs of jobs that end before the step."""
    decodes: bool = False
    """True if every generating sequence makes one more token (or several, with a draft model)."""
    preempts: tuple[int, ...] = ()
    """Generating jobs that give up their memory before that token; they are read again later, with what they made."""
    reserves: tuple[tuple[int, int], ...] = ()
    """(job, tokens for which its caches have memory from now on), where that has changed and rows are kept apart."""
    chunks: tuple[PromptChunk, ...] = ()
    """Prompt pieces to read together. There are several only if each one ends its prompt."""
    prefix_bytes: int | None = None
    """Trim the prefix cache to this size before the step; None leaves it alone."""
    clears: bool = False
    """True to return MLX's unused buffers to the system."""
