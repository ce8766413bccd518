"""Answers questions to the planner; large ones in a child process with a deadline, which ends with its work.

A question is a value and its answer a JSON document, so that both processes answer alike. Must not read the store.
"""

from collections.abc import Iterator
from typing import BinaryIO, Final, Literal

import msgspec
import orjson

from dashboard.history.object_recorder import document_of
from insight.conditions import Row
from insight.fleet_caches import FleetCaches, caches_of
from insight.simulated_macs import FleetNode
from insight.what_if import Supposition, SuppositionError, suppose
from machinery import limited_child
from machinery.clock import Clock, SystemClock
from machinery.limited_child import ChildEnd, ChildLimits
from manifests.observe import decode
from reconciler.listers.caches import BY_DEPLOYMENT, BY_KIND, BY_NODE
from schemas.deployment import ModelDeployment
from schemas.wire.errors import RefusedError, invalid, refused
from store import codec, keys
from store.port import KeyValue

LIMITS: Final = ChildLimits(memory_bytes=4 << 30, cpu_s=15, wall_s=30.0)
"""Limits of one question. Replicas times Macs decide the time: 3,000,000 of them take 8 s of a slow core."""
_MODULE: Final = "dashboard.question_process"
# The planner does so many in 50 ms; a child needs a second only to start.
_SMALL, _SMALL_FLEET = 20_000, 5_000
MOST_PLACEMENTS: Final = 3_000_000
"""Replicas that are to be placed times Macs that are compared for each."""


class PlannerQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question about the placement in a fleet."""

    kind: Literal["forecast", "explain", "doctor", "catalogue"]
    name: str = ""
    """The deployment to explain."""
    objects: tuple[tuple[str, bytes, int], ...] = ()
    """Objects that would be in the store: key, document and version."""
    lost: tuple[str, ...] = ()
    """Macs that would be gone."""
    added: tuple[bytes, ...] = ()
    """Macs that would join, as JSON."""


class _Asked(msgspec.Struct, frozen=True):
    """Input of a child: the question, and the documents of the fleet."""

    question: PlannerQuestion
    documents: tuple[tuple[str, bytes, int], ...]


def forecast_question(supposition: Supposition) -> PlannerQuestion:
    """Return the question about a supposed fleet."""
    puts = [(codec.put_spec(obj), obj.metadata.resource_version) for obj in supposition.objects]
    return PlannerQuestion(
        kind="forecast",
        objects=tuple((put.key, put.value, int(version or 0)) for put, version in puts),
        lost=supposition.lost,
        added=tuple(node.model_dump_json(by_alias=True).encode() for node in supposition.added),
    )


def answer(
    caches: FleetCaches, clock: Clock, question: PlannerQuestion, limits: ChildLimits = LIMITS
) -> Row:
    """Return the answer; may wait for a child.

    Args:
        caches: A copy that nothing else changes.
        clock: The clock.
        question: The question.
        limits: Those of the child.

    Raises:
        RefusedError: the question is too large, makes no sense, or was not answered by the deadline.

    """
    specs = caches.objects.specs
    wanted = {
        api_object.name: api_object.spec.replicas
        for api_object in specs.by_index(BY_KIND, "ModelDeployment").values()
        if isinstance(api_object, ModelDeployment)
    }
    declared = (
        {} if question.kind != "forecast" else dict(wanted)
    )  # forecast without the change, too
    for key, value, version in question.objects:
        kind, name = keys.kind_and_name(key)
        if kind == "ModelDeployment":
            api_object = decode(kind, KeyValue(key, value, version, version))
            wanted[name] = (
                api_object.spec.replicas if isinstance(api_object, ModelDeployment) else 0
            )
    missing = sum(
        max(0, count - specs.count(BY_DEPLOYMENT, name))
        for name, count in (*wanted.items(), *declared.items())
    )
    missing += sum(specs.count(BY_NODE, name) for name in question.lost)
    joining = sum(FleetNode.model_validate_json(node).count for node in question.added)
    macs = specs.count(BY_KIND, "Node") + joining
    placements = (missing + 1) * macs
    if placements > MOST_PLACEMENTS:
        raise invalid(
            f"This question compares {placements:,} placements (replicas that are missing, times Macs); at most "
            f"{MOST_PLACEMENTS:,} are compared. Ask about fewer replicas or fewer Macs at a time.",
            "replicas",
        )
    documents = sum(len(cache.items) for cache in caches.informers())
    if placements <= _SMALL and documents <= _SMALL_FLEET:
        found = _answer(caches, clock, question)
    else:
        asked = msgspec.msgpack.encode(_Asked(question, tuple(_documents(caches))))
        outcome = limited_child.run(_MODULE, asked, limits)
        if outcome.end is not ChildEnd.DONE:
            raise _not_answered(outcome.end, limits)
        found = orjson.loads(outcome.output)
    if (error := found.get("refused")) is not None:
        raise invalid(f"{error}.", "lose" if question.lost else "add")
    return found


def _not_answered(end: ChildEnd, limits: ChildLimits) -> RefusedError:
    reason = {
        ChildEnd.TIME: f"took more than {limits.cpu_s} s of a core or {limits.wall_s:.0f} s",
        ChildEnd.MEMORY: f"needed more than {limits.memory_bytes >> 30} GiB of memory",
    }.get(end, "ended without an answer")
    message = (
        f"The planner {reason} and was ended. Ask about fewer replicas or fewer Macs at a time."
    )
    return refused(503, message, retry_after_s=5)


def _documents(caches: FleetCaches) -> Iterator[tuple[str, bytes, int]]:
    for cache in caches.informers():
        for key, value in cache.items.items():
            yield key, document_of(value), cache.version(key)


def _answer(caches: FleetCaches, clock: Clock, question: PlannerQuestion) -> Row:
    if question.kind == "doctor":
        from insight.doctor import checks, findings, known_objects  # noqa: PLC0415 - takes 25 MB

        found = checks.run_checks(known_objects.known_objects(caches))
        return findings.findings_tree(found)
    from insight import (  # noqa: PLC0415 - as above
        catalogue_fit,
        memory_proof,
        placement,
        plan,
        remedies,
    )

    if question.kind == "forecast":
        objects = [
            decode(keys.kind_and_name(key)[0], KeyValue(key, value, version, version))
            for key, value, version in question.objects
        ]
        supposition = Supposition(
            objects=tuple(objects),
            lost=question.lost,
            added=tuple(FleetNode.model_validate_json(one) for one in question.added),
        )
        try:
            supposed = suppose(caches, clock, supposition)
        except SuppositionError as error:
            return {"refused": str(error)}
        before = caches if supposition != Supposition() else None
        return {**plan.forecast_of(supposed, clock, before)}
    snapshot = placement.snapshot_of(caches, clock.now())
    if question.kind == "catalogue":
        return {**catalogue_fit.fleet_tree(snapshot.table().nodes)}
    report = placement.explain_placement(snapshot, question.name)
    if report is None:
        return {}
    is_pending = not any(node.fits for node in report.nodes)
    suggested = remedies.find_remedies(snapshot, question.name) if is_pending else []
    proofs = remedies.find_proofs(snapshot, question.name)
    return {
        "placed": report.placed,
        "desired": report.desired,
        "proof": placement.need_lines(report),
        "text": placement.report_text(report),
        "proofs": {node: memory_proof.proof_tree(proof) for node, proof in proofs.items()},
        "remedies": [remedy.tree for remedy in suggested],
        **placement.placement_tree(report),
    }


def _serve(raw: bytes, output: BinaryIO) -> None:
    asked = msgspec.msgpack.decode(raw, type=_Asked)
    clock = SystemClock()
    items = (KeyValue(key, value, version, version) for key, value, version in asked.documents)
    output.write(orjson.dumps(_answer(caches_of(items, clock), clock, asked.question)))


def main() -> None:
    """Answer the question on stdin."""
    limited_child.serve(_serve, LIMITS)


if __name__ == "__main__":
    main()
