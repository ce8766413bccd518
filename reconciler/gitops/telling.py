"""What became of GitSources, as events for people."""

from reconciler.gitops.applying import Result
from reconciler.gitops.due import short
from reconciler.gitops.verdict import drift_text, listed
from schemas.event import ObjectReference
from schemas.gitsource import GitSource, GitSourceStatus
from schemas.meta import Truth, find_condition
from store.events import EventRecorder


async def tell_applied(
    recorder: EventRecorder, source: GitSource, revision: str, result: Result, *, is_new: bool
) -> None:
    """Record what was written."""
    about = _about(source)
    if is_new:
        counts = (("created", result.created), ("configured", result.configured))
        done = [
            f"{len(which)} {word}" for word, which in (*counts, ("pruned", result.pruned)) if which
        ]
        message = f"{short(revision)} is applied: {', '.join(done) or 'nothing had to change'}"
        await recorder.record(about, "Applied", message)
        return
    names = [f"{kind.lower()}/{name}" for kind, name in (*result.created, *result.configured)]
    if result.drift and source.spec.drift_policy == "Correct":
        message = f"put back as {short(revision)} says: {listed([drift_text(one) for one in result.drift])}"
        await recorder.record(about, "DriftCorrected", message, type_="Warning")
    elif names:
        await recorder.record(
            about, "DriftCorrected", f"put back: {listed(names)}", type_="Warning"
        )
    if result.pruned:
        gone = [f"{kind.lower()}/{name}" for kind, name in result.pruned]
        await recorder.record(about, "Pruned", f"deleted: {listed(gone)}")


async def tell_status(
    recorder: EventRecorder, source: GitSource, old: GitSourceStatus | None, new: GitSourceStatus
) -> None:
    """Record what of a status is news that people should not miss."""
    if old is not None and old.drift != new.drift and new.drift:
        message = listed([drift_text(one) for one in new.drift])
        await recorder.record(_about(source), "Drifted", message, type_="Warning")
    before = None if old is None else find_condition(old.conditions, "Ready")
    ready = find_condition(new.conditions, "Ready")
    if ready is None or ready.status is Truth.TRUE or ready.reason in _QUIET:
        return
    if before is None or (before.reason, before.message) != (ready.reason, ready.message):
        await recorder.record(_about(source), ready.reason, ready.message, type_="Warning")


# Not what went wrong, but what is waited for.
_QUIET = ("Suspended", "WaitingForHealth", "DependencyNotReady")


def _about(source: GitSource) -> ObjectReference:
    return ObjectReference(kind="GitSource", name=source.name, uid=source.metadata.uid)
