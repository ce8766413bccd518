"""Limits of vocabulary, context and memory, for requests whose tokens are known. Pure."""

from collections.abc import Iterable, Sequence

from engine.memory.budget import MemoryBudget
from engine.openai import prompts
from engine.openai.request_body import GenerationRequest, TextPrompts
from engine.text.template_traits import TemplateTraits
from schemas.wire import errors
from schemas.wire.errors import RefusedError

# OpenAI's default for completions. The default of a chat is the rest of the context.
_COMPLETION_MAX_TOKENS = 16
# Prompt tokens of one request whose log probabilities are reported: with five alternatives each takes up to 1 kB.
_SCORED_PROMPT_TOKENS = 32_768


def check_bias(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse a bias for a token that is not in the vocabulary.

    Raises:
        RefusedError: there is one.

    """
    check_vocabulary((token for token, _ in request.sampling.logit_bias), vocab_size, "logit_bias")


def check_infill(request: GenerationRequest, traits: TemplateTraits) -> None:
    """Refuse to fill a gap with a model whose vocabulary has no tokens for it.

    Raises:
        RefusedError: it has none.

    """
    prompt = request.prompt
    if isinstance(prompt, TextPrompts) and prompt.infill is not None and traits.infill is None:
        raise errors.invalid(
            f"'{request.model}' cannot fill a gap: its tokenizer has no fill-in-the-middle tokens. Leave 'suffix' out, "
            "or deploy a model that has them, such as Qwen2.5-Coder, StarCoder2, DeepSeek-Coder or Codestral.",
            param="suffix",
            code="unsupported_parameter",
        )


def check_tokens(tokens: Sequence[int], vocab_size: int, *, param: str = "prompt") -> None:
    """Refuse tokens that would crash a model or index its embedding out of bounds.

    Raises:
        RefusedError: there are no tokens, or one is not in the vocabulary.

    """
    if not tokens:
        raise errors.invalid("The prompt must not be empty.", param=param)
    check_vocabulary(tokens, vocab_size, param)


def check_prompt_logprobs(request: GenerationRequest, prompt_tokens: int) -> None:
    """Refuse a prompt whose log probabilities would take too much memory.

    Raises:
        RefusedError: it is one.

    """
    most = _SCORED_PROMPT_TOKENS // request.size
    if request.has_prompt_logprobs and prompt_tokens > most:
        choices = "" if request.size == 1 else f" of each of {request.size} choices"
        message = (
            f"The prompt has {prompt_tokens} tokens; 'echo' with 'logprobs' reports those of at most {most}{choices}. "
            "Send shorter prompts, or fewer in one request."
        )
        raise errors.invalid(message, param="prompt")


def check_vocabulary(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse tokens outside the vocabulary.

    Raises:
        RefusedError: there is one; names `param`.

    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            message = f"Token {token} is not in the model's vocabulary of {vocab_size}."
            raise errors.invalid(f"Invalid '{param}': {message}", param=param)


def resolve_max_tokens(request: GenerationRequest, prompt_tokens: int, context_length: int) -> int:
    """Return the largest number of tokens to generate.

    Raises:
        RefusedError: the context has no room for the prompt and the requested tokens.

    """
    left = context_length - prompt_tokens
    if left >= 1 and request.is_fitted:
        limit = request.max_tokens
        return min(request.default_max_tokens or left if limit is None else limit, left)
    if left >= 1 and request.max_tokens is None:
        usual = left if request.is_chat else _COMPLETION_MAX_TOKENS
        return min(request.default_max_tokens or usual, left)
    if request.max_tokens is not None and request.max_tokens <= left:
        return request.max_tokens
    raise _sum_exceeded(request, prompt_tokens, context_length)


def fit_to_memory(
    budget: MemoryBudget | None, request: GenerationRequest, prompt_tokens: int, max_tokens: int
) -> int:
    """Return the part of `max_tokens` that fits into memory; all of it without a budget.

    A default number, and one that may be fitted, is lowered; any other that does not fit is refused.

    Raises:
        RefusedError: the request would not fit even if it ran alone.

    """
    if budget is None:
        return max_tokens
    if request.max_tokens is None or request.is_fitted:
        max_tokens = max(1, min(max_tokens, budget.longest - prompt_tokens))
    param = "messages" if request.is_chat else "prompt"
    refusal = budget.refuse(prompt_tokens, max_tokens, param=param)
    if refusal is not None:
        raise RefusedError(refusal)
    return max_tokens


def _sum_exceeded(
    request: GenerationRequest, prompt_tokens: int, context_length: int
) -> RefusedError:
    param = "messages" if request.is_chat else "prompt"
    if request.max_tokens is None or prompt_tokens >= context_length:
        return prompts.context_exceeded(param, context_length, prompt_tokens)
    message = (
        f"This model's maximum context length is {context_length} tokens. However, you requested "
        f"{prompt_tokens + request.max_tokens} tokens ({prompt_tokens} in the {param}, "
        f"{request.max_tokens} in the completion). "
        f"Please reduce the length of the {param} or completion."
    )
    return errors.invalid(message, param=param, code="context_length_exceeded")


def too_many_choices(request: GenerationRequest, concurrency: int) -> RefusedError:
    """Return the refusal of a request for more choices than the engine has slots."""
    name = "n" if request.n > 1 else "prompt"
    message = (
        f"'{name}' asks for {request.size} choices in one request; this replica generates {concurrency} at once. "
        "Send several requests."
    )
    return errors.invalid(message, param=name)
