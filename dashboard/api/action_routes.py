"""Routes that change the fleet: manifests and actions on one object. Each is previewed first, and written by compare-and-swap.

The planner and the edits are those of fleetctl. Without --allow-writes every change is refused, and previews remain.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from dashboard.api.question_routes import QuestionRoutes, load_text
from dashboard.api.request_json import read_json
from dashboard.api.routes import json_response
from dashboard.auth import Visitor
from dashboard.question_process import forecast_question
from insight import actions, edits, rollouts
from insight.actions import VERBS, Action, PreparedAction
from insight.conditions import Row
from insight.what_if import Supposition
from machinery.clock import Clock
from machinery.request_body import BodyReader
from manifests import apply as applying
from manifests.apply import ApplyOptions, ApplyResult
from manifests.change_log import AuditedTransport, ChangeAuthor
from manifests.errors import ManifestErrors
from schemas.change import MAX_REASON
from schemas.deployment import ModelDeployment, Revision
from schemas.meta import ApiObject
from schemas.node import Taint, TaintEffect
from schemas.wire.errors import invalid, refused
from store import objects
from store.errors import ConflictError
from store.port import Transport

log = logging.getLogger(__name__)

MAX_TEXT: Final = 1 << 20
_READ_ONLY: Final = "This dashboard changes nothing: it was started without --allow-writes. The command beside it does the same."


class ManifestBody(msgspec.Struct, forbid_unknown_fields=True):
    """Manifests to apply."""

    manifests: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    plan: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The plan that was agreed to."""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class TaintBody(msgspec.Struct, forbid_unknown_fields=True):
    """A taint of a Mac."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=317)]
    effect: TaintEffect
    value: Annotated[str, msgspec.Meta(max_length=63)] = ""


class ActionBody(msgspec.Struct, forbid_unknown_fields=True):
    """An action on one object."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    version: Annotated[str, msgspec.Meta(max_length=20)] = ""
    """The resourceVersion that was looked at."""
    replicas: Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None = None
    revision: Annotated[int, msgspec.Meta(ge=1)] | None = None
    taint: TaintBody | None = None
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    dryRun: bool = False  # noqa: N815 - as in the query of Kubernetes


@dataclass(slots=True)
class ActionRoutes:
    """Handlers of `/api/v1/apply`, `/api/v1/actions/VERB` and `/api/v1/revisions/NAME`."""

    questions: QuestionRoutes
    bodies: BodyReader
    transport: Transport
    clock: Clock
    can_write: bool

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        router.add_api_route("/api/v1/apply", self.apply, methods=["POST"])
        router.add_api_route("/api/v1/actions/{verb}", self.act, methods=["POST"])
        router.add_api_route("/api/v1/revisions/{name}", self.revisions, methods=["GET"])
        path = "/api/v1/revisions/{name}/diff"
        router.add_api_route(path, self.revision_diff, methods=["GET"])

    async def apply(self, request: Request) -> Response:
        """Apply manifests as `fleetctl apply` does, if the plan is the one that was agreed to; else 409."""
        body = await read_json(self.bodies, request, ManifestBody)
        self._check_writes()
        if not body.plan:
            raise invalid("Name the plan that POST /api/v1/whatif returned.", "plan")
        options = ApplyOptions(expected_plan=body.plan)
        try:
            loaded = await self.questions.compute(lambda: load_text(body.manifests))
            audited = self._audited(request, "apply", body.reason)
            done = await applying.apply(audited, loaded, self.clock, options)
        except ManifestErrors as errors:
            # It was valid when it was checked.
            raise ConflictError(errors.show(3)) from errors
        self._log(
            request, "applied manifests", [f"{o.obj.kind}/{o.obj.name}" for o in done.outcomes]
        )
        return json_response(_result(done))

    async def act(self, verb: str, request: Request) -> Response:
        """Preview an action (`dryRun`), or carry it out if the object has the version that was looked at; else 409."""
        known = next((one for one in VERBS if one == verb), None)
        if known is None:
            raise refused(404, f"There is no action '{verb[:40]}'; there are {', '.join(VERBS)}.")
        body = await read_json(self.bodies, request, ActionBody)
        action = Action(
            verb=known,
            name=body.name,
            replicas=body.replicas,
            revision=body.revision,
            taint=_taint(body.taint),
        )
        if not body.dryRun:
            self._check_writes()
        audited = self._audited(request, action.command, body.reason)
        prepared = await actions.prepare(audited, self.clock, action)
        if body.dryRun:
            return json_response(await self._previewed(prepared))
        await actions.carry_out(audited, prepared, version=body.version)
        self._log(request, action.verb, [f"{action.kind.__name__}/{action.name}"])
        is_changed = prepared.after is not None
        return json_response({"isChanged": is_changed, "command": action.command})

    async def _previewed(self, prepared: PreparedAction) -> dict[str, object]:
        after = prepared.after
        placement = await self._placement([] if after is None else [after])
        return {
            "version": prepared.version,
            "isChanged": after is not None,
            "diff": prepared.diff,
            "command": prepared.action.command,
            "placement": placement,
            "canWrite": self.can_write,
        }

    async def revisions(
        self, name: str, before: Annotated[str, Query(max_length=80)] = ""
    ) -> Response:
        """List the revisions of a deployment, the newest first, with what differs from the one before.

        `before`: a recorded change; the answer names the revision that the deployment had before it, null if none has
        that content.
        """
        deployment, found = await self._revisions(name)
        number = None
        if before:
            number = await rollouts.read_revision_before(self.transport, deployment, before)
        rows = [
            {
                "name": str(revision.number),
                "revision": revision.number,
                "template": revision.template,
                "created": None if revision.created is None else revision.created.isoformat(),
                "cause": revision.cause,
                "isCurrent": revision.is_current,
                "diff": revision.diff,
            }
            for revision in rollouts.history_of(found, deployment)
        ]
        progress = rollouts.progress_of(deployment)
        return json_response({"revisions": rows[::-1], "progress": progress.text, "before": number})

    async def revision_diff(
        self,
        name: str,
        from_: Annotated[int, Query(alias="from", ge=1)],
        to: Annotated[int, Query(ge=1)],
    ) -> Response:
        """Return what differs between two revisions of a deployment, in either order."""
        known = {revision.spec.revision: revision for revision in (await self._revisions(name))[1]}
        for number in (from_, to):
            if number not in known:
                have = ", ".join(map(str, sorted(known))) or "none"
                raise refused(404, f"{name[:200]} has no revision {number}; it has {have}.")
        found = edits.revision_diff(known[from_], known[to])
        return json_response({"from": from_, "to": to, "diff": found})

    async def _revisions(self, name: str) -> tuple[ModelDeployment, list[Revision]]:
        """Return a deployment and its revisions, oldest first. Raises RefusedError."""
        deployment = await objects.get(self.transport, ModelDeployment, name)
        if deployment is None:
            raise refused(404, f"There is no ModelDeployment '{name[:200]}', or not any more.")
        return deployment, await rollouts.read_revisions(self.transport, deployment)

    async def _placement(self, changed: Iterable[ApiObject]) -> Row:
        """Return what the planner would do if these objects were written."""
        supposition = Supposition(objects=tuple(changed))
        found = await self.questions.ask(forecast_question(supposition))
        return {name: found[name] for name in ("sentence", "steps", "unplaced")}

    def _check_writes(self) -> None:
        if not self.can_write:
            raise refused(403, _READ_ONLY, "read_only")

    def _audited(self, request: Request, command: str, reason: str) -> Transport:
        """Return the transport that records each write with the visitor and the reason, in the same transaction."""
        visitor: Visitor = request.state.visitor
        author = ChangeAuthor(
            user=visitor.name or "local", manager="dashboard", command=command, reason=reason
        )
        return AuditedTransport(self.transport, self.clock, author)

    def _log(self, request: Request, verb: str, about: list[str]) -> None:
        visitor: Visitor = request.state.visitor
        log.info(
            "the page changed the fleet",
            extra={"user": visitor.name, "verb": verb, "objects": about[:20]},
        )


def _taint(body: TaintBody | None) -> Taint | None:
    if body is None:
        return None
    try:
        return Taint(key=body.key, value=body.value, effect=body.effect)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"The {first['loc'][0]} of the taint: {first['msg']}."
        raise invalid(message, "taint") from error


def _result(done: ApplyResult) -> dict[str, object]:
    return {
        "errors": [],
        "outcomes": [
            {"kind": outcome.obj.kind, "name": outcome.obj.name, "result": outcome.result}
            for outcome in done.outcomes
        ],
        "keptByOthers": [conflict.kept_message for conflict in done.kept_by_others],
    }
