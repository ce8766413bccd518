"""Sampling: values that a deployment gives to requests which leave them out."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.meta import ApiModel

UnknownParameters = Literal["Warn", "Refuse"]
Performance = Literal["OnRequest", "Always"]


class Sampling(ApiModel):
    """Values for requests that leave them out. The names and ranges are those of the API.

    What is left out here, too, comes from the model's generation_config.json, and otherwise has the default named below.
    """

    max_tokens: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Tokens of an answer, or fewer if the context has no room for them. Default: the rest of the context in chats, 16
    in completions."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 takes the most probable token. Default: 1."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Only the most probable tokens that together have this share. Default: 1."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Only so many of the most probable tokens. Default: 0, all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Only tokens with at least this share of the probability of the most probable one. Default: 0."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """Above 1: tokens that were there before become less probable. Default: 1."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logit of each token that was generated before. Default: 0."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """The same, once for each time. Default: 0."""
