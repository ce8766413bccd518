"""Every name OpenAI knows: what is honoured, what is a mere label, what is refused and why. Pure.

Nothing is ignored in silence: a name that is not honoured here may be sent only with a value that
asks for what happens anyway. `docs/reference/openai.md` is the same as a table; a test compares them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from engine import errors

Json: TypeAlias = Any  # as it came from the parser, before validation

# Their types are checked; they name who asks, and change no answer.
_LABELS = frozenset({"session_id", "user"})
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
# Not OpenAI's: known from other servers and from mlx-lm, or our own (`include_performance`, `fit_max_tokens`).
EXTENSIONS = frozenset(
    {
        "top_k",
        "min_p",
        "repetition_penalty",
        "xtc_probability",
        "xtc_threshold",
        "include_performance",
        "session_id",
        "fit_max_tokens",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedParameter:
    """A name that may be sent with values that change nothing, so that spelled-out defaults work."""

    values: tuple[Json, ...] = ()
    """Besides null."""
    why: str


_LIMITED_CHAT: Mapping[str, LimitedParameter] = {
    "audio": LimitedParameter(why="This engine makes text, no audio."),
    "function_call": LimitedParameter(
        values=("none", "auto"), why="It is deprecated; use 'tool_choice'."
    ),
    "functions": LimitedParameter(values=([],), why="It is deprecated; use 'tools'."),
    "modalities": LimitedParameter(values=(["text"],), why="This engine makes text only."),
    "moderation": LimitedParameter(why="This engine judges no content."),
    "prediction": LimitedParameter(why="This engine does not use predicted outputs."),
    "prompt_cache_options": LimitedParameter(
        values=({}, {"mode": "implicit"}),
        why="Prefixes are cached as they come and forgotten when memory is needed.",
    ),
    "prompt_cache_retention": LimitedParameter(
        values=("in_memory",), why="Prefixes are kept in memory, for no promised time."
    ),
    "service_tier": LimitedParameter(values=("auto", "default"), why="There is one tier."),
    "store": LimitedParameter(values=(False,), why="This engine stores no answers."),
    "verbosity": LimitedParameter(
        values=("medium",), why="The model's own length is what there is."
    ),
    "web_search_options": LimitedParameter(why="This engine does not search the web."),
}
_LIMITED_COMPLETION: Mapping[str, LimitedParameter] = {
    "suffix": LimitedParameter(
        values=("",), why="This engine continues texts and does not fill gaps."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointParameters:
    """The names of one endpoint."""

    honoured: frozenset[str]
    labels: frozenset[str]
    limited: Mapping[str, LimitedParameter]

    @property
    def names(self) -> frozenset[str]:
        """All that may be sent in some form."""
        return self.honoured | self.labels | self.limited.keys()

    def check(self, body: Mapping[str, Json]) -> None:
        """Refuse what would otherwise be ignored.

        Raises:
            RefusedError: a name is unknown, or asks for something the engine does not do.

        """
        for name, value in body.items():
            if name in self.honoured or name in self.labels:
                continue
            only = self.limited.get(name)
            if only is None:
                raise errors.invalid(
                    self._unknown(name), param=name[:100], code="unknown_parameter"
                )
            if value is not None and not _is_allowed(value, only.values):
                message = f"'{name}' is not supported with this value. {only.why} Leave it out."
                raise errors.invalid(message, param=name, code="unsupported_parameter")

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name[:100], sorted(self.names), n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return f"Unknown parameter: '{name[:100]}'.{hint}"


def chat_parameters() -> EndpointParameters:
    """Return the names of `/v1/chat/completions`."""
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
        honoured=_HONOURED | (EXTENSIONS - _LABELS) | own,
        labels=_LABELS_CHAT,
        limited=_LIMITED_CHAT,
    )


def completion_parameters() -> EndpointParameters:
    """Return the names of `/v1/completions`."""
    own = {"prompt", "best_of", "echo"}
    return EndpointParameters(
        honoured=_HONOURED | (EXTENSIONS - _LABELS) | own,
        labels=_LABELS,
        limited=_LIMITED_COMPLETION,
    )


def _is_allowed(value: Json, allowed: tuple[Json, ...]) -> bool:
    # True equals 1 in Python, and `n: true` is not `n: 1`.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
