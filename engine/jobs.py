"""Jobs and their results: the values that pass between the event loop and the worker thread. No mlx, no text.

The worker makes tokens. The event loop converts them to text (`text/`) while the next ones are computed.
"""

import hashlib
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import msgspec

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of sampling. There is always a seed, so that every run can be repeated.

    Penalties are those of OpenAI's API: presence and frequency apply to generated tokens, repetition (as in Hugging
    Face's generation) also to the prompt.
    """

    temperature: float
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, number to add to its logit)."""
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInput:
    """One image, one or two frames of a video, or one recording: decoded, and of the size that the model takes."""

    width: int
    """Pixels, or samples of a recording."""
    height: int
    """Pixels; 1 for a recording."""
    pixels: bytes
    """RGB, row by row from the top, frame after frame; of a recording, samples of 16 bits at 16 kHz."""
    tokens: int
    """The number of the prompt's tokens that stand for it."""
    kind: Literal["image", "frames", "audio"] = "image"

    @property
    def digest(self) -> str:
        """Return hexadecimal digits that identify what the model takes."""
        size = f"{self.kind}:{self.width}x{self.height}:".encode()
        return hashlib.blake2b(size + self.pixels, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate. All values are checked: the worker trusts them."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    """Most new tokens, including those of `emitted`."""
    sampling: SamplingParams
    min_tokens: int = 0
    """Number of new tokens before which no token may end the text, those of `emitted` included."""
    top_logprobs: int | None = None
    """Number of alternatives to report for every token; None reports no logprobs at all."""
    has_prompt_logprobs: bool = False
    """True to report logprobs of the prompt's tokens, too. Such a prompt is read whole, whatever is cached of it."""
    grammar: str | None = None
    """The grammar of the whole output, in llguidance's Lark dialect; checked before."""
    grammar_param: str = ""
    """The path of the schema in the request, for a refusal of text that is too costly to match."""
    cache_salt: str = ""
    """Jobs with different salts share no cached prefixes; empty for the one shared cache."""
    adapter: str = ""
    """The LoRA adapter to use, by the name of its content; empty for the model alone."""
    images: tuple[MediaInput, ...] = ()
    """Images, frames and recordings of the prompt, in the order of the tokens that stand for them."""
    cache_prompt: tuple[int, ...] = ()
    """The prompt as the prefix cache finds it: the tokens of images are numbers of their content. () if it has none."""
    system_tokens: int = 0
    """Tokens of the system message and the tools at its prompt's beginning, which other prompts share; 0 if not known."""
    is_pinned: bool = False
    """True to never evict its prompt from the prefix cache; such a job has no salt."""
    request_id: str = ""
    """The ID of its request, for the log."""
    emitted: tuple[int, ...] = ()
    """Tokens that another process generated for this job before it died; the next token continues them."""

    @property
    def cache_tokens(self) -> tuple[int, ...]:
        """Return the tokens by which the prefix cache finds the job's keys and values."""
        return (self.cache_prompt or self.prompt) + self.emitted


@dataclass(slots=True)
class FileDescriptor:
    """An open file, closed with the last reference: the worker may still read it when its client has left."""

    number: int

    def __del__(self) -> None:
        """Close it."""
        os.close(self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class PcmFile:
    """Decoded audio in a file without a name: an hour in memory would be 115 MB for each request."""

    RATE: ClassVar[int] = 16_000
    """Samples a second."""
    descriptor: FileDescriptor
    """Mono samples of 16 bits, little-endian, behind `offset`."""
    offset: int
    samples: int

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.samples / self.RATE

    def read(self, start: int, count: int) -> bytes:
        """Return `count` samples from `start` on, or those that there are. Any thread may call it."""
        most = max(0, min(count, self.samples - start))
        return os.pread(self.descriptor.number, 2 * most, self.offset + 2 * start)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """Sequences to turn into one vector each."""

    id: int
    prompts: tuple[tuple[int, ...], ...]
    second_starts: tuple[int, ...] = ()
    """For each pair of texts, the index of the first token of the second one; () without pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeJob:
    """Speech to turn into text, a window of 30 s at a time."""

    id: int
    audio: PcmFile
    language: str = ""
    """A code such as `en`; empty to detect it from the first window."""
    translates: bool = False
    """True to write it down in English."""
    prompt: str = ""
    """Text that precedes the first window, for names and style."""
    temperature: float = 0.0
    """0 takes the likeliest token, and samples a window again whose text is implausible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakJob:
    """Sentences to speak, one after the other."""

    id: int
    sentences: tuple[str, ...]
    voice: str


SpeechJob: TypeAlias = TranscribeJob | SpeakJob


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Cancels a job whose client is gone."""

    job_id: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Frees the model and ends the thread."""


WorkerOrder: TypeAlias = Job | EmbedJob | SpeechJob | CancelJob | StopWorker


# Measured; an alternative is an entry in two arrays.
_OUTPUT_BYTES, _LOGPROBS_BYTES, _ALTERNATIVE_BYTES = 256, 256, 8


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities by the model's own distribution (before penalties, bias and temperature)."""

    logprob: float
    """Of the chosen token; natural logarithm."""
    top_tokens: "array[int]"
    """The alternatives, likeliest first. Arrays: those of many tokens wait for a client that reads slowly."""
    top_logprobs: "array[float]"
    """Log probabilities of the alternatives, in 32 bits as they are computed."""

    @property
    def top(self) -> Iterable[tuple[int, float]]:
        """(token, log probability) of the alternatives, likeliest first."""
        return zip(self.top_tokens, self.top_logprobs, strict=True)


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One token of one job."""

    job_id: int
    token: int
    finish: FinishReason | None = None
    """`stop` if the token ends the text; it is then no part of the text."""
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    """On the first token: number of prompt tokens that came from the prefix cache."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """On the first token of a job that asks for them: those of each prompt token but the first, which follows nothing."""

    @property
    def memory_bytes(self) -> int:
        """Return about how much memory it takes, without the prompt: no client lets a first token wait."""
        if self.logprobs is None:
            return _OUTPUT_BYTES
        alternatives = len(self.logprobs.top_tokens)
        return _OUTPUT_BYTES + _LOGPROBS_BYTES + _ALTERNATIVE_BYTES * alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The vectors of an `EmbedJob`: one a prompt, as long as the model's width, of length 1 if its config says so."""

    job_id: int
    vectors: tuple[bytes, ...]
    """Each as little-endian float32: 2,048 vectors of Python floats would take hundreds of megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptSegment:
    """A piece of a transcript, as whisper makes them."""

    start_s: float
    end_s: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptOutput:
    """The segments of a window; there may be none."""

    job_id: int
    segments: tuple[TranscriptSegment, ...]
    language: str
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioOutput:
    """A piece of speech."""

    job_id: int
    samples: bytes
    """Mono samples of 16 bits, little-endian."""
    rate: int
    """Samples a second."""
    finish: FinishReason | None = None

    @property
    def memory_bytes(self) -> int:
        """Return about how much memory it takes."""
        return len(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """A job that the worker lost; the process continues."""

    job_id: int
    reason: str
    param: str | None = None
    """The part of the request that is to blame, so that no engine can answer it; None if this engine is."""


JobOutput: TypeAlias = TokenOutput | EmbeddingOutput | TranscriptOutput | AudioOutput
WorkerEvent: TypeAlias = JobOutput | JobFailure
