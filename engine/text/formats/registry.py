"""Registry of the formats of model families, and of the markers around reasoning."""

from collections.abc import Container
from dataclasses import replace

from engine.text.formats import (
    deepseek,
    gemma,
    harmony,
    hermes,
    kimi,
    llama,
    mistral,
    muse,
    pythonic,
    tags,
)
from engine.text.formats.answer import AnswerFormat
from engine.text.reasoning import ThinkingMarkers

# For models whose template knows no tools, and for enforced calls of models whose own format cannot be enforced.
PLAIN = replace(hermes.FORMAT, name="plain", models="any other model", is_native=False)
# The first that matches: a template of one family may mention the markers of another.
FORMATS = (
    harmony.FORMAT,
    kimi.K3,
    muse.FORMAT,
    tags.MINIMAX,
    tags.SEED,
    gemma.FORMAT,
    gemma.FUNCTION_GEMMA,
    hermes.LONGCAT,
    tags.GLM,
    tags.QWEN_CODER,
    kimi.FORMAT,
    tags.MINICPM,
    deepseek.V32,
    deepseek.V3,
    deepseek.FORMAT,
    mistral.IDS,
    mistral.V11,
    mistral.FORMAT,
    llama.FORMAT,
    pythonic.LFM2,
    pythonic.LLAMA,
    hermes.FORMAT,
)
_THINKING = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("[THINK]", "[/THINK]"),
    ("<|think:start|>", "<|think:end|>"),
)


def find_format(template: str, vocabulary: Container[str]) -> AnswerFormat:
    """Return the format of a model's answers; PLAIN if its template knows no tools or is of no known family."""
    # An answer without tools has channels, too.
    channelled = (harmony.FORMAT, kimi.K3, muse.FORMAT)
    forms = FORMATS if "tools" in template else channelled
    return next((form for form in forms if form.matches(template, vocabulary)), PLAIN)


def find_thinking(
    answer_format: AnswerFormat, vocabulary: Container[str]
) -> ThinkingMarkers | None:
    """Return the markers around a model's reasoning; None if it has none."""
    if answer_format.thinking is not None:
        return answer_format.thinking
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:  # Gemma 4
        return ThinkingMarkers(start="<|channel>thought", end="<channel|>")
    return next(
        (
            ThinkingMarkers(start=start, end=end)
            for start, end in _THINKING
            if start in vocabulary and end in vocabulary
        ),
        None,
    )
