"""Inspection of a model on a hub: its config.json and the headers of its weight files, and no weights.

A few kilobytes to a few megabytes are read, so that the memory proof is made before anything is fetched.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from models import inspection_process, model_files
from models.hf_config import ModelConfig
from models.hub.file_selection import DEFAULT_PATTERNS, select_files
from models.hub.fleet_hub import FleetHub
from models.hub.model_hub import ModelHub, RemoteFile
from models.inspection_process import MAX_HEADERS_BYTES
from models.model_files import ModelFacts, ModelUnusableError, PartBytes, WeightTotals
from schemas.blob_share import ModelListing
from schemas.model_snapshot import (
    MAX_CONFIG_CHARACTERS,
    LargeFile,
    ModelSnapshot,
    SnapshotWeights,
)

_CONFIG_FILE: Final = "config.json"
# mlx-lm reads weights from files with such names only.
_WEIGHT_FILE: Final = re.compile(r"model[^/]*\.safetensors")
_AT_ONCE: Final = 4
_CARD_FILE: Final = "README.md"
_MAX_CARD_BYTES: Final = 64 << 10
_MAX_LICENSES: Final = 10
_FRONT_MATTER: Final = re.compile(r"\A---[ \t]*\r?\n(.*?)\n---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_LICENSE: Final = re.compile(r"^license(?:_name)?:([^\n]*)((?:\n[ \t]*-[^\n]*)*)", re.MULTILINE)
# What is smaller weighs nothing beside the weights.
_LARGE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """Facts about a commit of a repository that are known without its weights."""

    files: tuple[RemoteFile, ...]
    """The files to fetch."""
    config: ModelConfig
    weights: WeightTotals
    headers: str = ""
    """config.json and the headers of the weight files, packed; "" if they are too long."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all files to fetch."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryFacts:
    """Facts by which a policy decides about a repository."""

    commit: str
    size_bytes: int
    """Bytes of the files that are fetched."""
    licenses: tuple[str, ...]
    """Licences on its card, in lower case; empty if it names none."""


async def describe_repository(hub: ModelHub, repo: str, revision: str) -> RepositoryFacts:
    """Return the commit of a revision, with its size and the licence on its card.

    Raises:
        ModelFetchError: the hub refuses, does not answer, or lists no model.

    """
    commit = await hub.resolve(repo, revision)
    listed = await hub.files(repo, commit)
    size = sum(file.size for file in select_files(listed))
    card = next((file for file in listed if file.path == _CARD_FILE), None)
    raw = b"" if card is None else await _read_start(hub, repo, commit, card, _MAX_CARD_BYTES)
    licenses = card_licenses(raw.decode(errors="replace"))
    return RepositoryFacts(commit=commit, size_bytes=size, licenses=licenses)


def card_licenses(card: str) -> tuple[str, ...]:
    """Return the licences that the front matter of a model card names: `license`, and `license_name` of another one."""
    front = _FRONT_MATTER.match(card)
    if front is None:
        return ()
    named: list[str] = []
    for match in _LICENSE.finditer(front[1]):
        values = [match[1]] if match[1].strip() else re.findall(r"-[ \t]+(.+)", match[2])
        named += (value.strip().strip("\"'").lower() for value in values)
    return tuple(name for name in dict.fromkeys(named) if name)[:_MAX_LICENSES]


async def inspect_remote(
    hub: ModelHub, repo: str, commit: str, patterns: tuple[str, ...] = ()
) -> RemoteModel:
    """Return what is known of a commit; empty `patterns` choose the default files.

    Raises:
        ModelFetchError: the hub refuses, does not answer, or lists no model.
        ModelUnusableError: the model cannot be served.

    """
    files = select_files(await hub.files(repo, commit), patterns or DEFAULT_PATTERNS)
    if isinstance(hub, FleetHub):
        return _listed_model(await hub.listing(repo, commit), files)
    config, text = await _read_config(hub, repo, commit, files)
    headers = await _read_headers(hub, repo, commit, files)
    thread = await asyncio.to_thread(inspection_process.sum_headers, repo, text, headers)
    return RemoteModel(files=files, config=config, weights=thread.weights, headers=thread.packed)


def _listed_model(listing: ModelListing, files: tuple[RemoteFile, ...]) -> RemoteModel:
    """Return what a Mac that has the model says of it; nothing of it needs to be read."""
    try:
        config = ModelConfig.model_validate_json(listing.config)
    except ValidationError as error:
        raise ModelUnusableError(
            f"{listing.repo}: the summary of config.json cannot be read; is a Mac of another release?"
        ) from error
    return RemoteModel(files=files, config=config, weights=_totals(listing.weights))


async def _read_config(
    hub: ModelHub, repo: str, commit: str, files: tuple[RemoteFile, ...]
) -> tuple[ModelConfig, str]:
    """Return config.json, and its text."""
    remote_file = next((file for file in files if file.path == _CONFIG_FILE), None)
    if remote_file is None:
        raise ModelUnusableError(f"{repo} has no config.json: not a model in MLX format")
    if remote_file.size > model_files.MAX_CONFIG_BYTES:
        raise ModelUnusableError(
            f"{repo}: config.json has {remote_file.size} bytes; at most {model_files.MAX_CONFIG_BYTES} are read"
        )
    raw = await _read_start(hub, repo, commit, remote_file, remote_file.size)
    try:
        return ModelConfig.model_validate_json(raw), raw.decode(errors="replace")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelUnusableError(
            f"{repo}: config.json: {where or 'content'}: {first['msg']}"
        ) from error


async def _read_headers(
    hub: ModelHub, repo: str, commit: str, files: tuple[RemoteFile, ...]
) -> dict[str, tuple[int, bytes]]:
    """Return the size and the header of each weight file."""
    weights = [file for file in files if _WEIGHT_FILE.fullmatch(file.path)]
    if not weights:
        raise ModelUnusableError(f"{repo} has no model*.safetensors: no weights in MLX format")
    if len(weights) > model_files.MAX_WEIGHT_FILES:
        raise ModelUnusableError(
            f"{repo} has more than {model_files.MAX_WEIGHT_FILES} weight files"
        )
    turns, left = asyncio.Semaphore(_AT_ONCE), MAX_HEADERS_BYTES

    async def read(file: RemoteFile) -> tuple[int, bytes]:
        nonlocal left
        async with turns:
            raw = await _read_header(hub, repo, commit, file)
        left -= len(raw)
        if left < 0:
            raise ModelUnusableError(
                f"{repo}: the headers of its weight files have more than {MAX_HEADERS_BYTES} bytes; no more are read"
            )
        return file.size, raw

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(file)) for file in weights]
    except BaseExceptionGroup as errors:  # the first to fail cancelled the others: it is the reason
        raise errors.exceptions[0] from None
    return {file.path: task.result() for file, task in zip(weights, tasks, strict=True)}


async def _read_header(hub: ModelHub, repo: str, commit: str, file: RemoteFile) -> bytes:
    path = Path(repo) / file.path
    async with hub.read(repo, commit, file) as pieces:
        lead = await _take(pieces, b"", model_files.LEAD_BYTES)
        length = model_files.header_length(lead[: model_files.LEAD_BYTES], path, file.size)
        whole = await _take(pieces, lead, model_files.LEAD_BYTES + length)
    return whole[model_files.LEAD_BYTES : model_files.LEAD_BYTES + length]


async def _read_start(hub: ModelHub, repo: str, commit: str, file: RemoteFile, count: int) -> bytes:
    async with hub.read(repo, commit, file) as pieces:
        return (await _take(pieces, b"", count))[:count]


async def _take(pieces: AsyncIterator[bytes], before: bytes, count: int) -> bytes:
    """Return `before` with the next pieces, until there are `count` bytes or the stream ends."""
    found = bytearray(before)
    while len(found) < count:
        piece = await anext(pieces, b"")
        if not piece:
            break
        found += piece
    return bytes(found)


def config_text(config: ModelConfig) -> str:
    """Return the fields of a config.json that are used, as JSON for a snapshot.

    Raises:
        ModelUnusableError: they are too long.

    """
    text = config.model_dump_json(exclude_none=True, exclude_unset=True)
    if len(text) > MAX_CONFIG_CHARACTERS:
        raise ModelUnusableError(
            f"config.json has lists of {len(text)} characters; at most {MAX_CONFIG_CHARACTERS} are kept"
        )
    return text


def snapshot_weights(weights: WeightTotals) -> SnapshotWeights:
    """Return the sums in the form of a snapshot."""
    return SnapshotWeights(
        total_bytes=weights.total_bytes,
        half_bytes=weights.half_bytes,
        replicated_bytes=weights.replicated_bytes,
        replicated_half_bytes=weights.replicated_half_bytes,
        parameters=weights.parameters,
        has_mtp_head=weights.has_mtp_head,
        expert_bytes=weights.experts.total,
        expert_half_bytes=weights.experts.half,
        looked_up_bytes=weights.looked_up.total,
        looked_up_half_bytes=weights.looked_up.half,
    )


def snapshot_files(files: tuple[RemoteFile, ...]) -> tuple[LargeFile, ...]:
    """Return the large files in the form of a snapshot, each content once."""
    sizes = {str(file.digest): file.size for file in files if file.size >= _LARGE_BYTES}
    return tuple(LargeFile(digest=name, size_bytes=size) for name, size in sorted(sizes.items()))


def snapshot_facts(snapshot: ModelSnapshot) -> ModelFacts:
    """Return the facts of a snapshot, as `inspect_model` returns those of its folder.

    Raises:
        ModelUnusableError: another release wrote a config that this one does not read.

    """
    try:
        config = ModelConfig.model_validate_json(snapshot.config)
    except ValidationError as error:
        raise ModelUnusableError(
            f"{snapshot.source.repo}: the reconciler's summary of config.json cannot be read"
        ) from error
    return model_files.model_facts(config, _totals(snapshot.weights))


def _totals(weights: SnapshotWeights) -> WeightTotals:
    return WeightTotals(
        total_bytes=weights.total_bytes,
        half_bytes=weights.half_bytes,
        replicated_bytes=weights.replicated_bytes,
        replicated_half_bytes=weights.replicated_half_bytes,
        parameters=weights.parameters,
        has_mtp_head=weights.has_mtp_head,
        experts=PartBytes(weights.expert_bytes, weights.expert_half_bytes),
        looked_up=PartBytes(weights.looked_up_bytes, weights.looked_up_half_bytes),
    )
