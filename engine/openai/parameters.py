"""Tables of the parameters of OpenAI's API, and of those that other servers add to it. Pure.

A parameter of OpenAI's is honoured, a label, or limited to values that ask for the default behaviour. One that only
other servers have, or a hint of OpenAI's, is left out with a warning, or refused where the deployment says so. A name
that is unknown everywhere is refused. `docs/reference/openai.md` has the same tables; a test compares them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

from schemas.wire import errors

Json: TypeAlias = Any  # parsed, not validated


class StrictModel(BaseModel):
    """A part of a body; unknown fields are refused. Strict types, so that "0.5" is no number."""

    model_config = ConfigDict(strict=True, extra="forbid")


class LenientModel(BaseModel):
    """A body, whose unknown fields were refused before, or a part of one, in which they are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


def check_count(value: Json, most: int, param: str) -> None:
    """Refuse a list with more than `most` parts, before anything looks at its parts.

    Raises:
        RefusedError: it is longer; names `param`.

    """
    if isinstance(value, list) and len(value) > most:
        message = f"'{param}' has {len(value)} parts; a request may have {most}."
        raise errors.invalid(message, param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedParameter:
    """A parameter that may only be sent with values that change nothing, so that explicit defaults work."""

    values: tuple[Json, ...] = ()
    """Accepted values."""
    reason: str
    is_hint: bool = False
    """True if it concerns speed, cost or style only, so that an answer without it is still the right one."""


LIMITED_CHAT: Mapping[str, LimitedParameter] = {
    "audio": LimitedParameter(reason="This engine generates text only."),
    "function_call": LimitedParameter(
        values=("none", "auto"), reason="It is deprecated; use 'tool_choice'."
    ),
    "functions": LimitedParameter(values=([],), reason="It is deprecated; use 'tools'."),
    "modalities": LimitedParameter(values=(["text"],), reason="This engine generates text only."),
    "moderation": LimitedParameter(reason="This engine does not moderate content."),
    "prediction": LimitedParameter(
        reason="This engine does not use predicted outputs.", is_hint=True
    ),
    "prompt_cache_options": LimitedParameter(
        values=({}, {"mode": "implicit"}),
        reason="Prefixes are always cached, and evicted when memory is needed.",
        is_hint=True,
    ),
    "prompt_cache_retention": LimitedParameter(
        values=("in_memory",),
        reason="Prefixes are kept in memory until it is needed.",
        is_hint=True,
    ),
    "service_tier": LimitedParameter(
        values=("auto", "default"), reason="There is one tier.", is_hint=True
    ),
    "store": LimitedParameter(values=(False, True), reason="This engine does not store answers."),
    "verbosity": LimitedParameter(
        values=("medium",), reason="The model decides how long its answers are.", is_hint=True
    ),
    "web_search_options": LimitedParameter(reason="This engine does not search the web."),
}


# Of other servers, by whose they are. An answer without them is still the right one.
OTHERS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "detokenize",
            "guided_decoding_backend",
            "guided_whitespace_pattern",
            "kv_transfer_params",
            "mm_processor_kwargs",
            "priority",
            "request_id",
            "return_token_ids",
            "return_tokens_as_token_ids",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "vllm_xargs",
        ),
        "vLLM",
    ),
    **dict.fromkeys(("no_stop_trim", "separate_reasoning", "stream_reasoning"), "SGLang"),
    **dict.fromkeys(
        (
            "dry_allowed_length",
            "dry_base",
            "dry_multiplier",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "dynatemp_exponent",
            "dynatemp_range",
            "id_slot",
            "mirostat",
            "mirostat_eta",
            "mirostat_tau",
            "min_keep",
            "n_cache_reuse",
            "n_indent",
            "n_keep",
            "post_sampling_probs",
            "repeat_last_n",
            "response_fields",
            "samplers",
            "t_max_predict_ms",
            "t_max_prompt_ms",
            "tfs_z",
            "timings_per_token",
            "top_n_sigma",
            "typical_p",
        ),
        "llama.cpp",
    ),
    **dict.fromkeys(
        (
            "frequency_context_size",
            "num_draft_tokens",
            "presence_context_size",
            "repetition_context_size",
        ),
        "mlx-lm",
    ),
    **dict.fromkeys(("context_overflow_policy", "ttl"), "LM Studio"),
    **dict.fromkeys(("keep_alive", "options"), "Ollama"),
    **dict.fromkeys(
        ("include_reasoning", "plugins", "provider", "route", "top_a", "transforms", "usage"),
        "OpenRouter",
    ),
    **dict.fromkeys(("enable_thinking", "thinking_budget"), "Qwen's service"),
}
# Of other servers: without them, the answer would be another one than was asked for. The words say what to send.
REPLACEMENTS: Mapping[str, str] = {
    "adapters": "the deployment says which adapter is loaded: spec.model.adapter",
    "allowed_token_ids": "use 'structured_outputs', or 'logit_bias'",
    "bad_words": "use 'logit_bias'",
    "chat_template": "the model's own template is used; send the whole text to /v1/completions",
    "documents": "put them into a message",
    "draft_model": "the deployment says which draft model is loaded: spec.model.draft",
    "ebnf": "use 'guided_grammar'",
    "format": "use 'response_format'",
    "grammar": "use 'guided_grammar'",
    "images": "send images in 'messages', as parts of the type 'image_url'",
    "include_stop_str_in_output": "add the stop word that 'stop_reason' names",
    "input": "chats have 'messages', completions have 'prompt'",
    "json_schema": "use 'response_format' or 'guided_json'",
    "length_penalty": "beam search is not supported",
    "logits_processors": "use 'logit_bias' or 'structured_outputs'",
    "lora_path": "the deployment says which adapter is loaded: spec.model.adapter",
    "n_predict": "use 'max_tokens'",
    "n_probs": "use 'logprobs'",
    "prompt_logprobs": "use 'echo' with 'logprobs' in /v1/completions",
    "reasoning": "use 'reasoning_effort'",
    "regex": "use 'guided_regex'",
    "stop_token_ids": "use 'stop'",
    "system": "send a message of the role 'system'",
    "think": "use 'reasoning_effort', or 'chat_template_kwargs'",
    "truncate_prompt_tokens": "shorten the prompt; /tokenize counts its tokens",
    "use_beam_search": "beam search is not supported",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointParameters:
    """The parameters of one endpoint."""

    model: type[BaseModel]
    """The body; its fields are honoured, or are labels: they identify the client and change no answer."""
    limited: Mapping[str, LimitedParameter] = field(default_factory=dict)
    takes_others: bool = False
    """True if the endpoint is one that other servers have with parameters of their own."""

    @property
    def names(self) -> frozenset[str]:
        """All names that may be sent."""
        return frozenset(self.model.model_fields) | self.limited.keys()

    def check(self, body: Mapping[str, Json], *, refuses_unknown: bool = False) -> tuple[str, ...]:
        """Return the names of the parameters to leave out: those of other servers, and hints that cannot be followed.

        Raises:
            RefusedError: a name is unknown, its value is not supported, or `refuses_unknown` and it would be left out.

        """
        return tuple(
            name
            for name, value in body.items()
            if name not in self.model.model_fields
            and self._is_left_out(name, value, refuses_unknown=refuses_unknown)
        )

    def _is_left_out(self, name: str, value: Json, *, refuses_unknown: bool) -> bool:
        limited = self.limited.get(name)
        if limited is not None:
            if _is_allowed(value, limited.values):
                return False
            if limited.is_hint and not refuses_unknown:
                return True
            message = f"'{name}' is not supported with this value. {limited.reason} Leave it out."
            raise errors.invalid(message, param=name, code="unsupported_parameter")
        if self.takes_others and name in OTHERS:
            if not refuses_unknown:
                return True
            message = f"'{name}' is a parameter of {OTHERS[name]}; this engine does not have it. Leave it out."
            raise errors.invalid(message, param=name, code="unsupported_parameter")
        if self.takes_others and name in REPLACEMENTS:
            message = f"'{name}' is not supported: {REPLACEMENTS[name]}."
            raise errors.invalid(message, param=name, code="unsupported_parameter")
        raise errors.invalid(self._unknown(name), param=name[:100], code="unknown_parameter")

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name[:100], sorted(self.names), n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return f"Unknown parameter: '{name[:100]}'.{hint}"


def _is_allowed(value: Json, allowed: tuple[Json, ...]) -> bool:
    # True equals 1 in Python, and `n: true` is not `n: 1`.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
