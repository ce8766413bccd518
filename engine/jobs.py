"""The words that pass between the event loop and the worker thread. Values only; no mlx, no text.

The worker makes tokens; what they spell is found on the event loop (`text/`), while the next ones are computed.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen; a seed is always given, so that every run can be repeated.

    Penalties are those of OpenAI's API: presence and frequency look at what was generated, repetition (as in
    Hugging Face's generation) at the prompt too.
    """

    temperature: float
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is no limit."""
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate, checked: the worker trusts every number in it."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    """At most this many new tokens, those of `emitted` included."""
    sampling: SamplingParams
    top_logprobs: int | None = None
    """How many alternatives to tell of every token; None: not even the token's own."""
    grammar: str | None = None
    """What the output must match from its first token on, in llguidance's Lark; checked before."""
    emitted: tuple[int, ...] = ()
    """Tokens another process made for this job before it died; the next one continues them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """Sequences to turn into one vector each."""

    id: int
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Nobody waits for this job any more."""

    job_id: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Free the model and end the thread."""


WorkerOrder: TypeAlias = Job | EmbedJob | CancelJob | StopWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely a token was, by the model's own distribution (before penalties, bias and temperature)."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, natural logarithm of its probability), the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One token of one job."""

    job_id: int
    token: int
    finish: FinishReason | None = None
    """`stop`: the token is one that ends texts, and is no part of the text."""
    likelihood: TokenLogprobs | None = None
    cached: int = 0
    """With the first token: how many of the prompt's were in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The vectors an `Embed` asked for: one a prompt, as long as the model is wide, of length 1 if it says so."""

    job_id: int
    vectors: tuple[bytes, ...]
    """Each as float32, little-endian: 2,048 of them as Python's floats would be hundreds of megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """The job was lost in the worker; the process goes on."""

    job_id: int
    reason: str


WorkerEvent: TypeAlias = TokenOutput | EmbeddingOutput | JobFailure
