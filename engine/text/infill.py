"""Formats of prompts that fill a gap between two texts, by the tokens of model families. Pure."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class InfillFile:
    """Another file of the client's project."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillFormat:
    """Format of one family; it can be pickled with the traits of a template."""

    models: str
    prefix: str
    """Precedes the text before the gap."""
    suffix: str
    """Precedes the text behind the gap."""
    middle: str = ""
    """Precedes the answer; empty if the text before the gap is last."""
    file: str = ""
    """Precedes the name of each file, if the family learned whole repositories."""
    repository: str = ""
    """Precedes the name of the repository."""
    ends: tuple[str, ...] = ()
    """Texts of the tokens with which models of the vocabulary end what they fill in."""

    def render(self, prefix: str, suffix: str, files: Sequence[InfillFile] = ()) -> str:
        """Return the prompt."""
        if not self.middle:
            gap = f"{self.suffix}{suffix}{self.prefix}{prefix}"
        else:
            gap = f"{self.prefix}{prefix}{self.suffix}{suffix}{self.middle}"
        if not files:
            return gap
        if self.file:
            parts = [f"{self.file}{file.name}\n{file.text}\n" for file in files]
            repository = f"{self.repository}project\n" if self.repository else ""
            return f"{repository}{''.join(parts)}{self.file}\n{gap}"
        # Before the tokens, as a text of its own: the same files then stay a prefix that is cached.
        return "".join(f"{file.text}\n\n" for file in files) + gap


_ENDS: Final = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<|file_separator|>",
    "<|cursor|>",
    "<|EOT|>",
    "<EOT>",
    "▁<EOT>",
    "<｜end▁of▁sentence｜>",
)
# The first whose tokens the vocabulary has.
FORMATS: Final = (
    InfillFormat(
        models="Qwen2.5-Coder, Qwen3-Coder",
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        file="<|file_sep|>",
        repository="<|repo_name|>",
    ),
    InfillFormat(
        models="CodeGemma",
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        file="<|file_separator|>",
    ),
    InfillFormat(
        models="Granite 3 and later",
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
    ),
    InfillFormat(
        models="StarCoder2, StableCode",
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        file="<file_sep>",
        repository="<repo_name>",
    ),
    InfillFormat(
        models="Granite Code, StarCoder",
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
    ),
    InfillFormat(
        models="DeepSeek-Coder, DeepSeek-Coder-V2",
        prefix="<｜fim▁begin｜>",
        suffix="<｜fim▁hole｜>",
        middle="<｜fim▁end｜>",
    ),
    InfillFormat(models="CodeLlama", prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>"),
    InfillFormat(models="Codestral", prefix="[PREFIX]", suffix="[SUFFIX]"),
)


def find_infill(vocabulary: Container[str]) -> InfillFormat | None:
    """Return the format whose tokens a vocabulary has; None if it has none."""
    for form in FORMATS:
        tokens = (form.prefix, form.suffix, form.middle, form.file, form.repository)
        own = [token for token in tokens if token]
        if all(token in vocabulary for token in own):
            ends = dict.fromkeys((*own, *(token for token in _ENDS if token in vocabulary)))
            # Sentencepiece's mark of a blank is one in the text.
            spelled = [token.replace("▁", " ") for token in ends if token.startswith("▁")]
            return replace(form, ends=(*ends, *spelled))
    return None
