"""Routes of questions about placement: why a replica does not fit, and what would happen if."""

import asyncio
import gzip
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, ValidationError

from dashboard import question_process
from dashboard.api.past import PastReader
from dashboard.api.routes import json_response, takes_gzip
from dashboard.api.time_parameters import show_time
from dashboard.fleet_model import FleetModel
from dashboard.question_process import PlannerQuestion, forecast_question
from insight.conditions import Row
from insight.fleet_caches import FleetCaches, copy_caches
from insight.simulated_macs import FleetNode
from insight.what_if import Supposition
from machinery.clock import Clock
from manifests import apply as applying
from manifests.declaration import clean_manifest
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject, parse_texts, read_objects
from manifests.observe import observe
from manifests.plan import Change, CreatedObject, UnchangedObject, change_text, plan_id
from manifests.yaml import core_schema
from schemas.meta import ApiModel, ApiObject, ObjectName
from schemas.wire.errors import invalid, refused
from store.errors import UnavailableError, UndecodableError
from store.port import Transport

T = TypeVar("T")
_MOST_BODY: Final = 1_000_000
_MOST_ERRORS: Final = 100
MAX_MANIFEST: Final = 128 << 10
"""Characters. Reading so much takes a second of a thread, and collecting its garbage 0.1 s of all threads."""
_LONGEST_S: Final = 10.0
_SOURCE: Final = "manifest"
_LEVEL: Final = 6
_FIT_COLUMNS: Final = (
    *("name", "state", "isCordoned", "taints", "chip", "allocatableBytes", "promisedBytes"),
)
"""Columns of the Macs on which depends what fits on them."""


class WhatIfQuestion(ApiModel):
    """The body of `POST /api/v1/whatif`."""

    manifest: str = ""
    """YAML of objects that would be applied."""
    lose: Annotated[tuple[ObjectName, ...], Field(max_length=1000)] = ()
    """Macs that would be gone."""
    add: Annotated[tuple[FleetNode, ...], Field(max_length=100)] = ()
    """Macs that would join."""


@dataclass(frozen=True, slots=True)
class QuestionRoutes:
    """Handlers of the routes. One question is computed at a time: in a thread, or in a child process if it is large."""

    model: FleetModel
    past: PastReader
    transport: Transport
    clock: Clock
    _slot: asyncio.Lock = field(default_factory=asyncio.Lock)
    _fits: dict[tuple[tuple[str, ...], ...], bytes] = field(default_factory=dict)
    """The last answer about the catalogue, packed by gzip, by the state of the Macs that it is for."""

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/api/v1/explain/deployment/{name}", self.explain, methods=["GET"])
        router.add_api_route("/api/v1/doctor", self.doctor, methods=["GET"])
        router.add_api_route("/api/v1/catalogue", self.catalogue, methods=["GET"])
        router.add_api_route("/api/v1/whatif", self.what_if, methods=["POST"])

    async def explain(self, name: str, at: Annotated[str, Query(max_length=40)] = "") -> Response:
        """Return for every Mac whether one more replica fits, or why not: what `fleetctl explain placement` says."""
        head: Row = {"at": show_time(self.clock.now().timestamp())}
        caches = None
        if at:
            moment = await self.past.moment(at)
            caches, head = moment.caches, {"at": show_time(moment.at_s)}
        found = await self.ask(PlannerQuestion(kind="explain", name=name), caches)
        if not found:
            raise refused(404, f"There is no ModelDeployment '{name[:200]}'.")
        return json_response({**head, **found})

    async def doctor(self) -> Response:
        """Return what `fleetctl doctor -o json` says of the store's objects; the command probes processes besides."""
        return json_response(await self.ask(PlannerQuestion(kind="doctor")))

    async def catalogue(self, request: Request) -> Response:
        """Return what `fleetctl models fit -o json` says: which models of the catalogue the Macs can serve, and how fast."""
        self._caches()
        macs = self.model.rows("macs").values()
        state = tuple(tuple(str(row[column]) for column in _FIT_COLUMNS) for row in macs)
        if state not in self._fits:
            fits = await self.ask(PlannerQuestion(kind="catalogue"))
            packed = await asyncio.to_thread(gzip.compress, orjson.dumps(fits), _LEVEL)
            self._fits.clear()
            self._fits[state] = packed
        body, headers = self._fits[state], {"vary": "accept-encoding", "content-encoding": "gzip"}
        if not takes_gzip(request):
            body = await asyncio.to_thread(gzip.decompress, body)
            del headers["content-encoding"]
        return Response(body, media_type="application/json", headers=headers)

    async def what_if(self, request: Request) -> Response:
        """Return what would happen if a manifest were applied, Macs were lost or Macs joined. Nothing is written."""
        question = parse_question(await _read_body(request))
        body: Row = {"errors": [], "plan": "", "changes": [], "steps": [], "macs": []}
        changes: list[Change] = []
        if question.manifest.strip():
            try:
                changes = await self.preview(question.manifest)
            except ManifestErrors as errors:
                return json_response({**body, "errors": error_rows(errors)})
            body["plan"] = plan_id(changes)
        supposition = Supposition(
            objects=tuple(changed_objects(changes)),
            lost=question.lose,
            added=question.add,
        )
        forecast = await self.ask(forecast_question(supposition))
        shown = await self.compute(lambda: [change_row(change) for change in changes])
        return json_response({**body, "changes": shown, **forecast})

    async def ask(self, question: PlannerQuestion, caches: FleetCaches | None = None) -> Row:
        """Return the answer of the planner. `caches`: a past moment; None: now.

        Raises:
            RefusedError: the question makes no sense or is too large, or the planner does not answer in time.

        """
        # Before the thread: the caches must not change while they are read.
        copied = caches or copy_caches(self._caches(), self.clock)
        return await self.compute(lambda: question_process.answer(copied, self.clock, question))

    async def preview(self, manifest: str) -> list[Change]:
        """Return what an apply would do.

        Raises:
            ManifestErrors: the problems of the manifest.
            StoreError: the store does not answer.

        """
        loaded = await self.compute(lambda: load_text(manifest))
        try:
            async with asyncio.timeout(_LONGEST_S):
                observed = await observe(self.transport, [item.key for item in loaded])
        except UndecodableError as error:
            raise ManifestErrors([ManifestError(source=_SOURCE, message=str(error))]) from error
        except TimeoutError as error:
            raise UnavailableError(f"not within {_LONGEST_S:g} s") from error
        return await self.compute(lambda: applying.compare(loaded, observed, self.clock))

    async def compute(self, work: Callable[[], T]) -> T:
        """Return what bounded work in a thread returns, one at a time.

        Raises:
            RefusedError: earlier work takes too long.

        """
        try:
            async with asyncio.timeout(_LONGEST_S):
                await self._slot.acquire()
        except TimeoutError as error:
            message = "Other questions are being answered. Try again."
            raise refused(503, message, retry_after_s=5) from error
        running = asyncio.get_running_loop().run_in_executor(None, work)
        # Its thread goes on if this request is cancelled, and has the slot until its end.
        running.add_done_callback(lambda _: self._slot.release())
        return await asyncio.shield(running)

    def _caches(self) -> FleetCaches:
        if not self.model.is_ready:
            message = "The state of the fleet is not known yet. Try again soon."
            raise refused(503, message, retry_after_s=1)
        return self.model.caches


async def _read_body(request: Request) -> bytes:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > _MOST_BODY:
            raise refused(413, "The body is larger than 1 MB.")
    return bytes(found)


def parse_question(body: bytes) -> WhatIfQuestion:
    """Return the question of a body. Raises RefusedError."""
    try:
        return WhatIfQuestion.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise invalid(f"'{where}': {first['msg']}.", where) from None


def load_text(text: str) -> list[LoadedObject]:
    """Return the objects that a text declares. Raises ManifestErrors."""
    if len(text) > MAX_MANIFEST:
        message = f"is longer than {MAX_MANIFEST >> 10} KiB, the most that a dashboard reads"
        hint = "Give fewer objects at a time, or use `fleetctl apply -f FILE --dry-run=server`"
        raise ManifestErrors([ManifestError(source=_SOURCE, message=message, hint=hint)])
    parsed = parse_texts([(_SOURCE, text)])
    if parsed.problems:
        raise ManifestErrors(parsed.problems)
    if not parsed.documents:
        raise ManifestErrors([ManifestError(source=_SOURCE, message="declares nothing", line=1)])
    return read_objects(parsed.documents)


def error_rows(errors: ManifestErrors) -> list[Row]:
    """Return the first problems of manifests, each with its place."""
    fields = ("line", "column", "about", "path", "message", "hint")
    return [
        {name: getattr(problem, name) for name in fields}
        for problem in errors.problems[:_MOST_ERRORS]
    ]


def changed_objects(changes: Iterable[Change]) -> Iterator[ApiObject]:
    """Yield the objects that would be written."""
    return (change.obj for change in changes if not isinstance(change, UnchangedObject))


def change_row(change: Change) -> Row:
    """Return what an apply would do to one object; a new one is shown without defaults."""
    if isinstance(change, CreatedObject):
        lines = core_schema.dump(clean_manifest(change.obj)).splitlines()
        result, diff = "created", "\n".join(f"+{line}" for line in lines)
    else:
        result = "unchanged" if isinstance(change, UnchangedObject) else "configured"
        diff = change_text(change)
    return {
        "kind": change.obj.kind,
        "name": change.obj.name,
        "result": result,
        "diff": diff,
        "keptByOthers": [conflict.kept_message for conflict in change.kept_by_others],
    }
