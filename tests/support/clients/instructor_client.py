"""instructor over OpenAI's client with its default settings, and in its JSON modes."""

import json
import sys
from typing import Literal

import instructor  # type: ignore[import-not-found]  # lives in .venv-clients
import openai
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Who is there?"}]


class Verdict(BaseModel):
    """A verdict that even a model of random weights can give."""

    colour: Literal["red", "green"]
    is_sure: bool


def main(url: str) -> None:
    """Send all requests."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    found = {}
    for name, how in (
        ("default", {}),
        ("json_schema", {"mode": instructor.Mode.JSON_SCHEMA}),
        ("tools_strict", {"mode": instructor.Mode.TOOLS_STRICT}),
    ):
        asked = instructor.from_openai(client, **how)
        answer = asked.chat.completions.create(
            model="tiny", messages=HELLO, response_model=Verdict, max_retries=0
        )
        found[name] = answer.model_dump()
    partial = instructor.from_openai(client).chat.completions.create_partial(
        model="tiny", messages=HELLO, response_model=Verdict
    )
    found["partial"] = list(partial)[-1].model_dump()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
