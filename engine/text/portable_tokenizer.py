"""A tokenizer that another process can have, without mlx."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.template_traits import Message, TemplateTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableTokenizer:
    """Tokenizer with the interface of mlx-lm's, from which a process without mlx makes an equal codec; can be pickled.

    Messages are rendered by transformers' own code, as in mlx-lm, whose few lines around it are repeated here.
    """

    tokenizer: Any
    """transformers' own tokenizer."""
    traits: TemplateTraits
    token_bytes: int
    """As `longest_token` returns it."""
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    has_thinking: bool
    thinking_switch: str
    """The template's name for the switch of reasoning."""
    renderer: Callable[..., str] | None
    """A function of mlx-lm that replaces the chat template."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "tokenizer":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def apply_chat_template(
        self, messages: Sequence[Message], *, tokenize: bool, **variables: Any
    ) -> Any:
        """Return the prompt as text or as tokens, as mlx-lm's wrapper does (mlx_lm/tokenizer_utils.py of 0.32.2)."""
        if self.thinking_switch != "enable_thinking" and "enable_thinking" in variables:
            variables[self.thinking_switch] = variables.pop("enable_thinking")
        variables.setdefault(self.thinking_switch, self.has_thinking)
        if self.renderer is None:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=tokenize, return_dict=False, **variables
            )
        text = self.renderer(messages, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False) if tokenize else text
