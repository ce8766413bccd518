"""Table of all parameters that OpenAI's API has: honoured, label, limited or refused. Pure.

No parameter is ignored: one that is not honoured may only be sent with a value that asks for the default behaviour.
`docs/reference/openai.md` has the same table; a test compares them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from schemas.wire import errors

Json: TypeAlias = Any  # parsed, not validated


def check_count(value: Json, most: int, param: str) -> None:
    """Refuse a list with more than `most` parts, before anything looks at its parts.

    Raises:
        RefusedError: it is longer; names `param`.

    """
    if isinstance(value, list) and len(value) > most:
        message = f"'{param}' has {len(value)} parts; a request may have {most}."
        raise errors.invalid(message, param=param)


# Their types are checked; they identify the client and change no answer.
_LABELS = frozenset({"cache_prompt", "session_id", "user"})
_LABELS_CHAT = _LABELS | {"metadata", "safety_identifier", "prompt_cache_key"}
_HONOURED = frozenset(
    {
        "model",
        "max_tokens",
        "n",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "stream",
        "stream_options",
    }
)
# Not OpenAI's: from other servers and mlx-lm, or ours (`include_performance`, `fit_max_tokens`).
EXTENSIONS = frozenset(
    {
        "top_k",
        "min_p",
        "repetition_penalty",
        "repeat_penalty",
        "xtc_probability",
        "xtc_threshold",
        "include_performance",
        "session_id",
        "fit_max_tokens",
        "cache_salt",
        "cache_prompt",
        "ignore_eos",
        "min_tokens",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "structured_outputs",
    }
)
CHAT_EXTENSIONS = frozenset(
    {"add_generation_prompt", "chat_template_kwargs", "continue_final_message"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedParameter:
    """A parameter that may only be sent with values that change nothing, so that explicit defaults work."""

    values: tuple[Json, ...] = ()
    """Accepted values besides null."""
    reason: str


_LIMITED_CHAT: Mapping[str, LimitedParameter] = {
    "audio": LimitedParameter(reason="This engine generates text only."),
    "function_call": LimitedParameter(
        values=("none", "auto"), reason="It is deprecated; use 'tool_choice'."
    ),
    "functions": LimitedParameter(values=([],), reason="It is deprecated; use 'tools'."),
    "modalities": LimitedParameter(values=(["text"],), reason="This engine generates text only."),
    "moderation": LimitedParameter(reason="This engine does not moderate content."),
    "prediction": LimitedParameter(reason="This engine does not use predicted outputs."),
    "prompt_cache_options": LimitedParameter(
        values=({}, {"mode": "implicit"}),
        reason="Prefixes are always cached, and evicted when memory is needed.",
    ),
    "prompt_cache_retention": LimitedParameter(
        values=("in_memory",), reason="Prefixes are kept in memory until it is needed."
    ),
    "service_tier": LimitedParameter(values=("auto", "default"), reason="There is one tier."),
    "store": LimitedParameter(values=(False, True), reason="This engine does not store answers."),
    "verbosity": LimitedParameter(
        values=("medium",), reason="The model decides how long its answers are."
    ),
    "web_search_options": LimitedParameter(reason="This engine does not search the web."),
}
_LIMITED_COMPLETION: Mapping[str, LimitedParameter] = {
    "suffix": LimitedParameter(
        values=("",), reason="This engine continues text and does not fill gaps."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointParameters:
    """The parameters of one endpoint."""

    honoured: frozenset[str]
    labels: frozenset[str]
    limited: Mapping[str, LimitedParameter]

    @property
    def names(self) -> frozenset[str]:
        """All names that may be sent."""
        return self.honoured | self.labels | self.limited.keys()

    def check(self, body: Mapping[str, Json]) -> None:
        """Refuse parameters that would otherwise be ignored.

        Raises:
            RefusedError: a name is unknown, or its value is not supported.

        """
        for name, value in body.items():
            if name in self.honoured or name in self.labels:
                continue
            limited = self.limited.get(name)
            if limited is None:
                raise errors.invalid(
                    self._unknown(name), param=name[:100], code="unknown_parameter"
                )
            if value is not None and not _is_allowed(value, limited.values):
                message = (
                    f"'{name}' is not supported with this value. {limited.reason} Leave it out."
                )
                raise errors.invalid(message, param=name, code="unsupported_parameter")

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name[:100], sorted(self.names), n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return f"Unknown parameter: '{name[:100]}'.{hint}"


def chat_parameters() -> EndpointParameters:
    """Return the parameters of `/v1/chat/completions`."""
    own = {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "reasoning_effort",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }
    return EndpointParameters(
        honoured=_HONOURED | (EXTENSIONS - _LABELS) | CHAT_EXTENSIONS | own,
        labels=_LABELS_CHAT,
        limited=_LIMITED_CHAT,
    )


def completion_parameters() -> EndpointParameters:
    """Return the parameters of `/v1/completions`."""
    own = {"prompt", "best_of", "echo"}
    return EndpointParameters(
        honoured=_HONOURED | (EXTENSIONS - _LABELS) | own,
        labels=_LABELS,
        limited=_LIMITED_COMPLETION,
    )


def _is_allowed(value: Json, allowed: tuple[Json, ...]) -> bool:
    # True equals 1 in Python, and `n: true` is not `n: 1`.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
