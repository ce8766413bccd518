"""The sampling values that a model's authors recommend: `generation_config.json`, as Hugging Face's generation has it."""

import logging
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from models import model_files
from models.model_files import ModelUnusableError
from schemas.sampling import Sampling

log = logging.getLogger(__name__)

_FILE: Final = "generation_config.json"


class _GenerationConfig(BaseModel):
    """The fields that chats need; their values are checked one by one."""

    model_config = ConfigDict(extra="ignore")

    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None


def recommended_sampling(folder: Path) -> Sampling:
    """Return the values of a model's folder; none if it has no such file.

    A value that no request could have is left out, and so is a file that cannot be read: a model serves without it.
    """
    if not (folder / _FILE).is_file():
        return Sampling()
    try:
        json_file = model_files.parse_json_file(_GenerationConfig, folder / _FILE)
    except ModelUnusableError as error:
        log.warning("generation_config.json is not used", extra={"why": str(error)})
        return Sampling()
    kept: dict[str, Any] = {}
    for name, value in json_file.model_dump(exclude_none=True).items():
        try:
            kept |= Sampling.model_validate({name: value}).model_dump(exclude_none=True)
        except ValidationError as error:
            why = error.errors(include_url=False)[0]["msg"]
            log.warning("a recommended value is not used", extra={"parameter": name, "why": why})
    return Sampling.model_validate(kept)


def fill_in(sampling: Sampling, folder: Path) -> Sampling:
    """Return the values of a deployment, with those of the model where it has none."""
    given = sampling.model_dump(exclude_none=True)
    return Sampling.model_validate(
        recommended_sampling(folder).model_dump(exclude_none=True) | given
    )
