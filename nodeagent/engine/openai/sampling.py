"""The parameters that say how tokens are drawn, in OpenAI's names and our own; and what the worker is told of them. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from nodeagent.engine import errors
from nodeagent.engine.jobs import Sampling

Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
# Below, logits divided by it overflow float32; what is drawn is the likeliest token anyway.
_COLDEST = 1e-4


class SamplingBody(BaseModel):
    """Strict, so that "0.5" is no number; unknown names were refused before, neutral ones drop."""

    model_config = ConfigDict(strict=True, extra="ignore")

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None


def read(body: SamplingBody) -> Sampling:
    """Return it without a seed.

    Raises:
        RefusedError: a bias is for no token.

    """
    given: dict[str, Any] = {
        name: value
        for name in (
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "xtc_probability",
            "xtc_threshold",
        )
        if (value := getattr(body, name)) is not None
    }
    top_k, top_p = max(body.top_k or 0, 0), body.top_p  # -1 is vLLM's "no limit"
    if top_p == 0:
        # The smallest set of tokens with some probability is the likeliest alone.
        top_k, top_p = 1, None
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(
        temperature=temperature if temperature >= _COLDEST else 0.0,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k,
        logit_bias=_bias(body.logit_bias or {}),
        **given,
    )


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and str(int(token[:20])) == token):
            raise errors.invalid(
                f"The keys of 'logit_bias' are token ids; '{token[:50]}' is none.",
                param="logit_bias",
            )
    return tuple(sorted((int(token), bias) for token, bias in given.items() if bias))
