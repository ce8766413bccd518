"""Guesses of the next tokens without a second model, which a deployment's engines verify in one step."""

from typing import Annotated, Final

from pydantic import Field

from schemas.meta import ApiModel

GUESS_FIELDS: Final = ("draft", "ngram", "mtp")
"""The fields of a model that say where guesses of the next tokens come from; a deployment has one at most."""


class NgramGuesses(ApiModel):
    """Guesses of the next tokens, verified in one step: what followed the last tokens before follows them again."""

    tokens: Annotated[int, Field(ge=1, le=16)] = 8
    """Tokens to guess at once, while a single request runs. The output does not depend on it."""


class MtpGuesses(ApiModel):
    """Guesses of the multi-token prediction (MTP) head that some checkpoints have, verified in one step."""

    tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Most tokens to guess at once, while a single request runs. The output does not depend on it."""
