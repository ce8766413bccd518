"""What a model and its context have room for; of requests whose tokens are known. Pure."""

from collections.abc import Iterable, Sequence

from engine import errors
from engine.errors import RefusedError
from engine.memory.budget import MemoryBudget
from engine.openai.request_body import GenerationRequest

# OpenAI's own; a chat's default is all that is left.
_COMPLETION_MAX_TOKENS = 16


def check_bias(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse a bias for tokens that the model does not have.

    Raises:
        RefusedError: there is one.

    """
    check_vocabulary((token for token, _ in request.sampling.logit_bias), vocab_size, "logit_bias")


def check_tokens(tokens: Sequence[int], vocab_size: int, *, param: str = "prompt") -> None:
    """Refuse what would crash a model or make it read beyond its embedding.

    Raises:
        RefusedError: there are no tokens, or some that the model does not have.

    """
    if not tokens:
        raise errors.invalid("The prompt must not be empty.", param=param)
    check_vocabulary(tokens, vocab_size, param)


def check_vocabulary(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        RefusedError: there are some; names `param`.

    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            message = f"Token {token} is not in the model's vocabulary of {vocab_size}."
            raise errors.invalid(f"Invalid '{param}': {message}", param=param)


def resolve_max_tokens(request: GenerationRequest, prompt_tokens: int, context_length: int) -> int:
    """Return how many tokens may be generated.

    Raises:
        RefusedError: the context has no room for the prompt and what was asked for.

    """
    left = context_length - prompt_tokens
    if left >= 1 and request.is_fitted:
        return left if request.max_tokens is None else min(request.max_tokens, left)
    if left >= 1 and request.max_tokens is None:
        return left if request.is_chat else min(_COMPLETION_MAX_TOKENS, left)
    if request.max_tokens is not None and request.max_tokens <= left:
        return request.max_tokens
    raise _too_long(request, prompt_tokens, context_length)


def fit_to_memory(
    memory: MemoryBudget | None, request: GenerationRequest, prompt_tokens: int, max_tokens: int
) -> int:
    """Return how many of `max_tokens` there is memory for; without a budget nobody counts.

    A number that nobody asked for, or that is to be fitted, is made smaller; others are refused.

    Raises:
        RefusedError: the request would not fit if it were alone.

    """
    if memory is None:
        return max_tokens
    if request.max_tokens is None or request.is_fitted:
        max_tokens = max(1, min(max_tokens, memory.longest - prompt_tokens))
    what = "messages" if request.is_chat else "prompt"
    refusal = memory.refuse(prompt_tokens, max_tokens, param=what)
    if refusal is not None:
        raise RefusedError(refusal)
    return max_tokens


def _too_long(request: GenerationRequest, prompt_tokens: int, context_length: int) -> RefusedError:
    what = "messages" if request.is_chat else "prompt"
    limit = f"This model's maximum context length is {context_length} tokens."
    if request.max_tokens is None or prompt_tokens >= context_length:
        wish = f"However, your {what} resulted in {prompt_tokens} tokens."
        cure = f"Please reduce the length of the {what}."
    else:
        total = prompt_tokens + request.max_tokens
        wish = (
            f"However, you requested {total} tokens ({prompt_tokens} in the {what}, "
            f"{request.max_tokens} in the completion)."
        )
        cure = f"Please reduce the length of the {what} or completion."
    return errors.invalid(f"{limit} {wish} {cure}", param=what, code="context_length_exceeded")


def too_many_choices(request: GenerationRequest, concurrency: int) -> RefusedError:
    """Return the refusal of a request that asks for more answers than there are slots."""
    name = "n" if request.n > 1 else "prompt"
    message = (
        f"'{name}' asks for {request.size} answers in one request; this replica generates {concurrency} at "
        "once. Send several requests."
    )
    return errors.invalid(message, param=name)
