"""Errors of the engine: its exceptions, and its refusals beside those of `schemas.wire.errors`."""

from schemas.wire.audio_limits import SpeechTask
from schemas.wire.errors import Refusal, RefusedError, internal, invalid, unavailable

__all__ = [
    "GrammarError",
    "GroupError",
    "PromptRefusedError",
    "Refusal",
    "RefusedError",
    "StoppedError",
    "TextTooLongError",
    "bodies_full",
    "draining",
    "input_too_costly",
    "input_worker_lost",
    "internal",
    "invalid",
    "is_panic",
    "job_failed",
    "not_a_speech_model",
    "not_a_text_model",
    "queue_full",
    "read_too_slowly",
    "summarize",
    "unavailable",
]

_MAX_SUMMARY_CHARACTERS = 400


class StoppedError(Exception):
    """The process was asked to stop while it loaded."""


class GroupError(Exception):
    """The group cannot continue: a rank is lost, silent, different or foreign. All ranks must start again."""


class PromptRefusedError(Exception):
    """The model's chat template does not support these messages."""


class TextTooLongError(Exception):
    """A text certainly has more tokens than the caller can use; it was not tokenized."""

    def __init__(self, min_tokens: int) -> None:
        super().__init__(f"at least {min_tokens} tokens")
        self.min_tokens = min_tokens


class GrammarError(Exception):
    """A schema or a grammar cannot be compiled; names the part and the reason."""


def read_too_slowly(limit_bytes: int) -> RefusedError:
    """Return the error of a stream whose client is the furthest behind of all, when too many tokens wait for clients."""
    message = (
        "The client reads too slowly: the tokens that wait for such clients take more than "
        f"{limit_bytes >> 20} MiB of memory, and most of them belong to this request."
    )
    return RefusedError(Refusal(status=408, message=message, code="read_too_slowly"))


def draining() -> RefusedError:
    """Return the refusal of a request that came, or would end, after the stop of this engine."""
    message = "This replica is shutting down; repeat the request."
    return unavailable(message, "draining", retry_after_s=1)


def queue_full(concurrency: int, limit: int, *, retry_after_s: int) -> RefusedError:
    """Return the refusal (429) of a request that finds all slots and all places in the queue taken."""
    message = (
        f"This replica runs {concurrency} requests at once and {limit} more are waiting already. "
        f"Try again in {retry_after_s} s."
    )
    return RefusedError(
        Refusal(
            status=429,
            message=message,
            code="queue_full",
            retry_after_s=retry_after_s,
        )
    )


def bodies_full(limit_bytes: int) -> RefusedError:
    """Return the refusal (429) of a large body, while other large bodies take all the memory for them."""
    message = (
        f"This replica reads other large requests already, {limit_bytes >> 20} MiB of them together at most. "
        "Try again in 1 s."
    )
    return RefusedError(
        Refusal(
            status=429,
            message=message,
            code="bodies_full",
            retry_after_s=1,
        )
    )


def input_too_costly(what: str) -> RefusedError:
    """Return the refusal of a request whose input cannot be prepared within the limits; `what` it takes too much of."""
    message = (
        f"Tokenizing these messages, or compiling their schema, takes {what}. Send shorter texts, simpler patterns or "
        "smaller schemas."
    )
    return invalid(message, code="input_too_costly")


def input_worker_lost(reason: str) -> RefusedError:
    """Return the refusal of a request whose worker ended for a reason that does not lie in the request."""
    message = f"The process that prepared this request has ended: {reason}. Repeat the request."
    return unavailable(message, "input_worker_lost", retry_after_s=1)


def job_failed(reason: str, param: str | None) -> RefusedError:
    """Return the error of a request whose job was lost: 400 if `param` of the request is to blame, else 500."""
    if param is None:
        return internal(f"The model failed on this request: {reason}")
    message = (
        f"Invalid '{param}': the text that it asks for is too costly to match: {reason}. Use simpler patterns, shorter "
        "repetitions or fewer alternatives."
    )
    return invalid(message, param=param, code="schema_too_complex")


_SPEECH_PATHS = {"Transcribe": "/v1/audio/transcriptions", "Speak": "/v1/audio/speech"}
_SPEECH_NAMES = {"Transcribe": "transcribes", "Speak": "speaks"}


def not_a_text_model(task: SpeechTask) -> RefusedError:
    """Return the refusal of text by a model that transcribes or speaks; its code names the task."""
    name = _SPEECH_NAMES[task]
    message = f"This model {name}; it generates no text. Use {_SPEECH_PATHS[task]}."
    return invalid(message, param="model", code=f"model_{name}")


def not_a_speech_model(wanted: SpeechTask, has: SpeechTask | None) -> RefusedError:
    """Return the refusal of a request for speech by a model that does something else."""
    instead = f"; use {_SPEECH_PATHS[has]}" if has else ", but reads and writes text"
    message = f"This model does not offer {_SPEECH_PATHS[wanted]}{instead}."
    return invalid(message, param="model", code="not_a_speech_model")


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust has panicked; such an error is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def summarize(error: BaseException) -> str:
    """Return an exception as one line of at most 400 characters."""
    words = " ".join(str(error).split())
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if len(text) <= _MAX_SUMMARY_CHARACTERS:
        return text
    return f"{text[: _MAX_SUMMARY_CHARACTERS - 3]}..."
