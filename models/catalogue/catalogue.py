"""Reads the shipped list of repositories. Sizes are computed from the configs, and never written down."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from models import model_files
from models.catalogue.dense_weights import GROUP_SIZE, DenseConfig, quantized_tensors
from models.hf_config import ModelConfig
from models.model_files import ModelFacts
from schemas.deployment import HUB_REPO_PATTERN


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    license: str
    config: DenseConfig


class _Repository(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    repo: str = Field(pattern=HUB_REPO_PATTERN)
    base: str
    bits: Literal[4, 8]


class CatalogueFile(BaseModel):
    """The content of repositories.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    date: date
    """Day on which the list was written."""
    models: dict[str, _Model]
    repositories: tuple[_Repository, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One repository of the list."""

    repo: str
    bits: int
    license: str
    config: DenseConfig
    facts: ModelFacts


@cache
def read_catalogue() -> CatalogueFile:
    """Return the shipped list."""
    raw = resources.files("models.catalogue").joinpath("repositories.json").read_bytes()
    return CatalogueFile.model_validate_json(raw)


def search(words: Sequence[str]) -> tuple[CatalogueEntry, ...]:
    """Return the repositories whose name, architecture or licence has every word, the smallest model first."""
    wanted = [word.lower() for word in words]
    listed = read_catalogue()
    found = []
    for repository in listed.repositories:
        base = listed.models[repository.base]
        text = f"{repository.repo} {base.config.model_type} {base.license}".lower()
        if all(word in text for word in wanted):
            found.append(_entry(repository, base))
    return tuple(sorted(found, key=lambda entry: (entry.facts.weight_bytes, entry.repo)))


def find(repo: str) -> CatalogueEntry | None:
    """Return a repository of the list; None if the list does not have it."""
    return next((entry for entry in search([repo]) if entry.repo == repo), None)


def _entry(one: _Repository, base: _Model) -> CatalogueEntry:
    config = ModelConfig.model_validate(base.config.model_dump())
    tensors = quantized_tensors(base.config, one.bits)
    weights = model_files.total_weights(tensors, group_size=GROUP_SIZE)
    return CatalogueEntry(
        repo=one.repo,
        bits=one.bits,
        license=base.license,
        config=base.config,
        facts=model_files.model_facts(config, weights),
    )
