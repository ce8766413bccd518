"""Routes of questions about placement: why a replica does not fit, and what would happen if."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeVar

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, ValidationError

from dashboard.api.past import PastReader
from dashboard.api.routes import json_response
from dashboard.api.time_parameters import show_time
from dashboard.fleet_model import FleetModel
from insight.conditions import Row
from insight.fleet_caches import FleetCaches, copy_caches
from insight.memory_proof import proof_tree
from insight.simulated_macs import FleetNode
from insight.what_if import Supposition, SuppositionError, suppose
from machinery.clock import Clock
from manifests import apply as applying
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject, parse_texts, read_objects
from manifests.plan import Change, UnchangedObject, change_text
from manifests.trees import Tree
from reconciler.listers.lister import Lister
from schemas.deployment import ModelDeployment, ModelDeploymentSpec
from schemas.meta import ApiModel, ObjectName
from schemas.wire.errors import Refusal, RefusedError, invalid
from store.errors import StoreError, UndecodableError
from store.port import Transport

T = TypeVar("T")
_MOST_BODY: Final = 1_000_000
_LONGEST_S: Final = 10.0
_SOURCE: Final = "manifest"
_FULL_BITS: Final = 16


class DeploymentPatch(ApiModel):
    """A deployment that exists, with other numbers; None keeps one."""

    deployment: ObjectName
    replicas: int | None = None
    context_length: int | None = None
    concurrency: int | None = None
    kv_bits: Literal[4, 8, 16] | None = None


class WhatIfQuestion(ApiModel):
    """The body of `POST /api/v1/whatif`."""

    manifest: str = ""
    """YAML of objects that would be applied."""
    lose: Annotated[tuple[ObjectName, ...], Field(max_length=1000)] = ()
    """Macs that would be gone."""
    add: Annotated[tuple[FleetNode, ...], Field(max_length=100)] = ()
    """Macs that would join."""
    patches: Annotated[tuple[DeploymentPatch, ...], Field(max_length=100)] = ()
    """Deployments with other numbers."""


@dataclass(frozen=True, slots=True)
class QuestionRoutes:
    """Handlers of the routes. One question is computed at a time, in a thread."""

    model: FleetModel
    past: PastReader
    transport: Transport
    clock: Clock
    _slot: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/api/v1/explain/deployment/{name}", self.explain, methods=["GET"])
        router.add_api_route("/api/v1/doctor", self.doctor, methods=["GET"])
        router.add_api_route("/api/v1/whatif", self.what_if, methods=["POST"])

    async def explain(self, name: str, at: Annotated[str, Query(max_length=40)] = "") -> Response:
        """Return for every Mac whether one more replica fits, or why not: what `fleetctl explain placement` says."""
        from insight import placement  # noqa: PLC0415 - the planner takes 25 MB
        from insight import remedies as remedies_of  # noqa: PLC0415 - as above

        now = self.clock.now()
        head: Row = {"at": show_time(now.timestamp())}
        if at:
            moment = await self.past.moment(at)
            caches, head = moment.caches, {"at": show_time(moment.at_s)}
        else:
            # A thread must not read what the event loop changes.
            caches = copy_caches(self._caches(), self.clock)
        seen = placement.snapshot_of(caches, now)
        report = await self._compute(lambda: placement.explain_placement(seen, name))
        if report is None:
            message = f"There is no ModelDeployment '{name[:200]}'."
            raise RefusedError(Refusal(status=404, message=message))
        is_pending = not any(one.fits for one in report.nodes)
        remedies = await self._compute(
            lambda: remedies_of.find_remedies(seen, name) if is_pending else []
        )
        shown: Row = {
            "placed": report.placed,
            "desired": report.desired,
            "proof": placement.need_lines(report),
            "text": placement.report_text(report),
            "proofs": {
                node: proof_tree(one) for node, one in remedies_of.find_proofs(seen, name).items()
            },
            "remedies": [one.tree for one in remedies],
        }
        return json_response({**head, **shown, **placement.placement_tree(report)})

    async def doctor(self) -> Response:
        """Return what `fleetctl doctor -o json` says of the store's objects; the command probes processes besides."""
        from insight.doctor import checks, findings, known_objects  # noqa: PLC0415 - as above

        caches = copy_caches(self._caches(), self.clock)
        found = await self._compute(
            lambda: checks.check_objects(known_objects.known_objects(caches))
        )
        return json_response(findings.findings_tree(found))

    async def what_if(self, request: Request) -> Response:
        """Return what would happen if a manifest were applied, Macs were lost or Macs joined. Nothing is written."""
        question = parse_question(await _read_body(request))
        caches = self._caches()
        errors, changes = await self._changes(question.manifest)
        body: Row = {
            "errors": [error_row(one) for one in errors],
            "changes": [],
            "steps": [],
            "macs": [],
        }
        if errors:
            return json_response(body)
        patched = tuple(_patched(caches, one) for one in question.patches)
        supposition = Supposition(
            objects=(
                *(one.obj for one in changes if not isinstance(one, UnchangedObject)),
                *patched,
            ),
            lost=question.lose,
            added=question.add,
        )
        try:
            forecast = await self.forecast(supposition)
        except SuppositionError as error:
            raise invalid(f"{error}.", "lose" if question.lose else "add") from None
        shown = [_change(one) for one in changes if not isinstance(one, UnchangedObject)]
        return json_response({**body, "changes": shown, **forecast})

    async def forecast(self, supposition: Supposition) -> dict[str, Tree]:
        """Return what the planner would do in a supposed fleet, as a tree.

        Raises:
            RefusedError: the planner does not answer in time.
            SuppositionError: the supposition makes no sense.

        """
        from insight import plan  # noqa: PLC0415 - the planner takes 25 MB

        # Before the thread: the caches must not change while they are copied.
        supposed = suppose(self._caches(), self.clock, supposition)
        return plan.forecast_tree(
            await self._compute(lambda: plan.forecast_of(supposed, self.clock))
        )

    async def _changes(self, manifest: str) -> tuple[tuple[ManifestError, ...], list[Change]]:
        """Return what an apply would change, or the problems of the manifest."""
        if not manifest.strip():
            return (), []
        try:
            loaded = await asyncio.to_thread(load_text, manifest)
            async with asyncio.timeout(_LONGEST_S):
                return (), await applying.prepare(self.transport, loaded, self.clock)
        except ManifestErrors as error:
            return error.problems, []
        except UndecodableError as error:
            return (ManifestError(source=_SOURCE, message=str(error)),), []
        except (StoreError, TimeoutError) as error:
            raise store_refusal(error) from error

    async def _compute(self, question: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(_LONGEST_S), self._slot:
                return await asyncio.to_thread(question)
        except TimeoutError as error:
            message = "Other questions are being answered, or this one takes too long. Try again."
            refusal = Refusal(status=503, message=message, type="server_error", retry_after_s=5)
            raise RefusedError(refusal) from error

    def _caches(self) -> FleetCaches:
        if not self.model.is_ready:
            message = "The state of the fleet is not known yet. Try again soon."
            refusal = Refusal(status=503, message=message, type="server_error", retry_after_s=1)
            raise RefusedError(refusal)
        return self.model.caches


def _patched(caches: FleetCaches, patch: DeploymentPatch) -> ModelDeployment:
    """Return a deployment with other numbers. Raises RefusedError."""
    found = Lister(caches.objects).declared(patch.deployment)
    if found is None:
        raise invalid(f"There is no ModelDeployment '{patch.deployment}'.", "patches")
    tree = found.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    tree |= patch.model_dump(by_alias=True, exclude_none=True, exclude={"deployment", "kv_bits"})
    if patch.kv_bits is not None:
        bits = None if patch.kv_bits == _FULL_BITS else patch.kv_bits
        tree["kvCache"] = {**tree.get("kvCache", {}), "bits": bits}
    try:
        spec = ModelDeploymentSpec.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise invalid(f"'{where}': {first['msg']}.", "patches") from None
    return found.model_copy(update={"spec": spec})


async def _read_body(request: Request) -> bytes:
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > _MOST_BODY:
            raise RefusedError(Refusal(status=413, message="The body is larger than 1 MB."))
    return found


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
    parsed = parse_texts([(_SOURCE, text)])
    if parsed.problems:
        raise ManifestErrors(parsed.problems)
    if not parsed.documents:
        raise ManifestErrors([ManifestError(source=_SOURCE, message="declares nothing", line=1)])
    return read_objects(parsed.documents)


def store_refusal(error: Exception) -> RefusedError:
    """Return the refusal of a request that the store did not answer."""
    message = f"The control plane does not answer, so nothing was changed or compared: {error}"
    refusal = Refusal(
        status=503,
        message=message,
        type="server_error",
        code="store_unavailable",
        retry_after_s=2,
    )
    return RefusedError(refusal)


def error_row(one: ManifestError) -> Row:
    """Return a problem of a manifest with its place."""
    return {
        "line": one.line,
        "column": one.column,
        "about": one.about,
        "path": one.path,
        "message": one.message,
        "hint": one.hint,
    }


def _change(one: Change) -> Row:
    return {
        "kind": one.obj.kind,
        "name": one.obj.name,
        "isNew": one.obj.metadata.resource_version in ("", None),
        "diff": change_text(one),
    }
