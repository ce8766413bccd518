"""Prompts that an engine read last, for an engine that takes over its requests: the documents of the routes.

Everything in them is bounded: they come from another machine.
"""

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from schemas.meta import ApiModel

ENGINE_PATH: Final = "/cache/prompts"
"""The engine's route, for the agent of its node."""
PATH: Final = "/v1/prompts"
"""The agent's route, for agents of other nodes; below it is the name of a replica."""
MAX_PROMPTS: Final = 64
MAX_TOKENS: Final = 32_768
"""Tokens of all prompts of one engine."""
MAX_PROMPT_TOKENS: Final = 8_192
"""Tokens of one prompt; of a longer one its beginning is kept."""
MAX_BODY_BYTES: Final = 1 << 20

_Token = Annotated[int, Field(ge=0, lt=2**31)]


class RecentPrompt(ApiModel):
    """The beginning of one prompt."""

    salt: Annotated[str, StringConstraints(max_length=600)] = ""
    """The salt of its cached blocks: that of the API key, a colon and that of the request; empty without one."""
    tokens: Annotated[tuple[_Token, ...], Field(max_length=MAX_PROMPT_TOKENS)]

    @property
    def key_salt(self) -> str:
        """The salt of the API key; empty if there is none."""
        return self.salt.partition(":")[0]

    @property
    def request_salt(self) -> str:
        """The salt of the request; empty if there is none."""
        return self.salt.partition(":")[2]


class RecentPrompts(ApiModel):
    """The prompts of one engine, newest first."""

    prompts: Annotated[tuple[RecentPrompt, ...], Field(max_length=MAX_PROMPTS)] = ()
