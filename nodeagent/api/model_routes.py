"""The routes of the models on an agent's disk: list, check, pin, remove, fetch, quantize (`fleetctl models`).

Reads need a ticket, changes an administrator (nodeagent/api/admin_access.py). No route takes a body or a part of a path:
a model is named by its folder, whose form is checked, and must be in the store's records.
"""

import asyncio
import logging
import shutil
from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models import quantization
from models.model_store.integrity import FileDefect, check_model
from models.model_store.store import ModelStore
from nodeagent.api.admin_access import AdminAccess
from nodeagent.model_store.collector import ModelCollector
from nodeagent.model_store.pulls import ModelPulls, TooManyPullsError
from nodeagent.model_store.quantizations import (
    QuantizationOrder,
    QuantizationRefusedError,
    Quantizations,
)
from nodeagent.model_store.usage import ModelUsers
from schemas.deployment import HUB_COMMIT_PATTERN, HubReference, HubSource
from schemas.meta import ApiModel
from schemas.wire.errors import RefusedError
from schemas.wire.stored_models import (
    FETCHES_PATH,
    MAX_MODELS,
    PATH,
    QUANTIZATIONS_PATH,
    FolderName,
    ModelChange,
    ModelCheck,
    ModelDefect,
    NodeModels,
    QuantizationMode,
    QuantizationRecipe,
    StoredModelReport,
)
from store.codec import UndecodableError
from store.errors import StoreError
from store.tickets import TicketDenial

log = logging.getLogger(__name__)

_MAX_DEFECTS = 1000

NameParam = Annotated[FolderName, Path()]
AuthorizationHeader = Annotated[str, Header()]


class CheckQuery(BaseModel):
    """The query of a check."""

    model_config = ConfigDict(extra="forbid")

    hash: bool = False
    """True to read and hash every byte."""


class FetchQuery(BaseModel):
    """The query of a fetch: one commit of a repository."""

    model_config = ConfigDict(extra="forbid")

    repo: str = Field(max_length=200)
    commit: str = Field(pattern=rf"^{HUB_COMMIT_PATTERN}$")
    endpoint: str = Field(default="", max_length=500)
    """The hub; empty for the agent's own."""
    source: HubSource = "huggingface"
    branch: str = Field(default="", max_length=200)
    """The branch that the commit was read from; empty for a hub that is asked by commit."""

    def reference(self) -> HubReference:
        """Return the reference. Raises ValidationError."""
        return HubReference(
            repo=self.repo,
            revision=self.commit,
            endpoint=self.endpoint or None,
            source=self.source,
            branch=self.branch or None,
        )


class QuantizationQuery(BaseModel):
    """The query of a quantization: a model of this Mac, and what is to be made of it."""

    model_config = ConfigDict(extra="forbid")

    source: FolderName
    mode: QuantizationMode = "affine"
    bits: int | None = Field(default=None, ge=1, le=64)
    group_size: int | None = Field(default=None, ge=1, le=4096)
    quant_predicate: QuantizationRecipe | None = None
    name: str = Field(default="", max_length=200)
    """The name of the result; empty for the derived one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoutes:
    """The routes of one agent's models."""

    collector: ModelCollector
    pulls: ModelPulls
    quantizations: Quantizations | None
    access: AdminAccess

    @property
    def _store(self) -> ModelStore:
        return self.collector.store

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the agent's API."""
        for path, answer, method in (
            (PATH, self.list_models, "GET"),
            (f"{PATH}/{{name}}/check", self.check, "GET"),
            (f"{PATH}/{{name}}/pin", self.pin, "PUT"),
            (f"{PATH}/{{name}}/pin", self.unpin, "DELETE"),
            (f"{PATH}/{{name}}", self.remove, "DELETE"),
            (FETCHES_PATH, self.fetch, "POST"),
            (QUANTIZATIONS_PATH, self.quantize, "POST"),
            (f"{QUANTIZATIONS_PATH}/{{name}}", self.cancel_quantization, "DELETE"),
        ):
            app.add_api_route(path, answer, methods=[method])

    async def list_models(self, authorization: AuthorizationHeader = "") -> Response:
        """Answer with all models of this Mac, and the fetches that people asked for."""
        await self._check_ticket(authorization)
        try:
            users: ModelUsers | None = await self.collector.users()
        except (StoreError, UndecodableError):
            users = None
        thread = await asyncio.to_thread(self._read, users)
        more: dict[str, object] = {"fetches": tuple(self.pulls.reports())}
        if self.quantizations is not None:
            more["quantizations"] = tuple(self.quantizations.reports())
            more["available_memory_bytes"] = self.quantizations.available_bytes()
        return _response(thread.model_copy(update=more))

    def _read(self, users: ModelUsers | None) -> NodeModels:
        root = next(path for path in (self._store.root, *self._store.root.parents) if path.exists())
        disk = shutil.disk_usage(root)
        return NodeModels(
            models=tuple(
                StoredModelReport(
                    name=model.name,
                    repo=model.repo,
                    commit=model.commit,
                    size_bytes=model.size_bytes,
                    files=len(model.files),
                    absent_files=len(model.absent),
                    absent_bytes=model.absent_bytes,
                    fetched_at=model.fetched_at,
                    loaded_at=model.loaded_at,
                    is_pinned=model.is_pinned,
                    used_by=None if users is None else users.of(model.name),
                )
                for model in self._store.models()[:MAX_MODELS]
            ),
            disk_bytes=disk.used + disk.free,
            free_bytes=disk.free,
        )

    async def check(
        self,
        name: NameParam,
        query: Annotated[CheckQuery, Query()],
        authorization: AuthorizationHeader = "",
    ) -> Response:
        """Answer with the defects of a model; none if it is what its record says."""
        await self._check_ticket(authorization)
        self._check_recorded(name)
        thread = await asyncio.to_thread(check_model, self._store, name, hashes=query.hash)
        defects = tuple(map(_defect, thread[:_MAX_DEFECTS]))
        model = await asyncio.to_thread(self._store.find_by_name, name)
        absent = 0 if model is None else len(model.absent)
        return _response(ModelCheck(name=name, absent_files=absent, defects=defects))

    async def pin(
        self, request: Request, name: NameParam, authorization: AuthorizationHeader = ""
    ) -> Response:
        """Protect a model from collection."""
        user = await self.access.authorize(request, authorization)
        model = await asyncio.to_thread(self._store.find_by_name, name)
        if model is None or not await asyncio.to_thread(self._store.pin, name):
            raise self._absent(name)
        log.info("model pinned", extra={"model": name, "user": user})
        return _response(ModelChange(name=name, is_changed=not model.is_pinned))

    async def unpin(
        self, request: Request, name: NameParam, authorization: AuthorizationHeader = ""
    ) -> Response:
        """Allow the collection of a model again."""
        user = await self.access.authorize(request, authorization)
        self._check_recorded(name)
        was_pinned = await asyncio.to_thread(self._store.unpin, name)
        log.info("model unpinned", extra={"model": name, "user": user})
        return _response(ModelChange(name=name, is_changed=was_pinned))

    async def remove(
        self, request: Request, name: NameParam, authorization: AuthorizationHeader = ""
    ) -> Response:
        """Remove a model that nothing uses and that is not pinned."""
        user = await self.access.authorize(request, authorization)
        self._check_recorded(name)
        model = await asyncio.to_thread(self._store.find_by_name, name)
        if model is not None and model.is_pinned:
            raise self.access.refused(409, f"{name} is pinned; run `fleetctl models unpin` first")
        try:
            users = (await self.collector.users()).of(name)
        except (StoreError, UndecodableError) as error:
            raise self.access.refused(
                503, f"the store does not tell what uses {name}, so it stays: {error}"
            ) from error
        if users:
            shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if users[5:] else "")
            raise self.access.refused(409, f"{name} is used by {shown}")
        freed = await asyncio.to_thread(self._store.remove, name)
        log.warning("model removed by a person", extra={"model": name, "user": user})
        return _response(ModelChange(name=name, is_changed=True, freed_bytes=freed))

    async def fetch(
        self,
        request: Request,
        query: Annotated[FetchQuery, Query()],
        authorization: AuthorizationHeader = "",
    ) -> Response:
        """Start to fetch a commit of a repository; `GET /v1/models` tells how far it is."""
        user = await self.access.authorize(request, authorization)
        try:
            source = query.reference()
            self.pulls.start(source)
        except ValidationError as error:
            raise self.access.refused(400, error.errors()[0]["msg"]) from error
        except TooManyPullsError as error:
            raise self.access.refused(429, str(error)) from error
        log.info("model pulled by a person", extra={"model": source.folder, "user": user})
        return _response(ModelChange(name=source.folder, is_changed=True))

    async def quantize(
        self,
        request: Request,
        query: Annotated[QuantizationQuery, Query()],
        authorization: AuthorizationHeader = "",
    ) -> Response:
        """Start to quantize a model, or find the job that does; `GET /v1/models` tells how far it is."""
        user = await self.access.authorize(request, authorization)
        try:
            scheme = quantization.choose_scheme(
                query.mode, query.bits, query.group_size, query.quant_predicate
            )
        except ValueError as error:
            raise self.access.refused(400, str(error)) from error
        order = QuantizationOrder(source=query.source, scheme=scheme, name=query.name)
        if self.quantizations is None:
            raise self.access.refused(404, "this agent makes no models")
        try:
            report = await self.quantizations.start(order)
        except QuantizationRefusedError as error:
            raise self.access.refused(error.status, str(error)) from error
        log.info("quantization asked for", extra={"model": report.repo, "user": user})
        return _response(report)

    async def cancel_quantization(
        self,
        request: Request,
        name: Annotated[str, Path(max_length=200)],
        authorization: AuthorizationHeader = "",
    ) -> Response:
        """Cancel a quantization that waits or runs, by the name of its result."""
        user = await self.access.authorize(request, authorization)
        report = None if self.quantizations is None else self.quantizations.cancel(name)
        if report is None:
            raise self.access.refused(404, f"no quantization to {name[:200]} runs")
        log.info("quantization cancelled", extra={"model": report.repo, "user": user})
        return _response(report)

    async def _check_ticket(self, authorization: str) -> None:
        found = await self.access.tickets.check(authorization)
        if isinstance(found, TicketDenial):
            raise self.access.refused(found.status, found.why)

    def _check_recorded(self, name: str) -> None:
        """Refuse a name that the store has no record of."""
        if name not in self._store.manifest_names():
            raise self._absent(name)

    def _absent(self, name: str) -> RefusedError:
        return self.access.refused(404, f"{name} is not on this Mac")


def _defect(found: FileDefect) -> ModelDefect:
    return ModelDefect(path=found.path[:2000], defect=found.defect, message=found.message[:2000])


def _response(document: ApiModel) -> Response:
    return Response(document.model_dump_json(by_alias=True), media_type="application/json")
