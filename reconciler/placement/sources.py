"""May this node serve from what it has on its disk: the model, its adapter, its draft model? And what would that take? Pure."""

from collections.abc import Iterator

from reconciler.observe import NodeView
from reconciler.placement import columns
from reconciler.placement.cache import PACKED_TOGETHER, groups_of
from reconciler.placement.columns import Asked, Both
from reconciler.placement.proof import Extras, prove
from reconciler.placement.rejected import Rejected
from reconciler.placement.want import Want
from schemas import quantity
from schemas.deployment import KvCache
from schemas.node import AdapterReport, ModelGeometry, ModelReport
from schemas.replica import MemoryProof

_NOT_PLAIN = "has no layers with plain keys and values of all tokens"


def column(want: Want) -> Asked:
    """Return all of a node that the questions of this file look at."""
    source = want.spec.model
    found: Asked = columns.Model(source.path)
    if source.draft is not None:
        found = Both(found, columns.Model(source.draft.path))
    if source.adapter is not None:
        found = Both(found, columns.Adapter(source.adapter))
    return found


def has_all(want: Want, node: NodeView) -> Rejected | None:
    """Ask for every folder that the engine reads."""
    for title, report in _reports(want, node):
        if report is None:
            return Rejected(
                reason="ModelNotInspected", message=f"its agent has not looked at the {title} yet"
            )
        if isinstance(report, ModelReport) and report.geometry is not None:
            continue
        if isinstance(report, ModelReport) or report.reason:
            prefix = "" if title == "model" else f"{title}: "
            return Rejected(
                reason=report.reason, message=f"{prefix}{report.message.removeprefix(prefix)}"
            )
    return None


def _reports(
    want: Want, node: NodeView
) -> Iterator[tuple[str, ModelReport | AdapterReport | None]]:
    source = want.spec.model
    yield "model", node.models.get(source.path)
    if source.draft is not None:
        yield "draft model", node.models.get(source.draft.path)
    if source.adapter is not None:
        yield "adapter", node.adapters.get(source.adapter)


def is_understood(want: Want, node: NodeView) -> Rejected | None:
    for title, geometry in _geometries(want, node):
        if geometry.unknown and not want.override_bytes:
            return Rejected(
                reason="ModelNotUnderstood",
                message=f"what the {title} needs is not known: {geometry.unknown}. Set "
                "spec.resources.memory to what one replica takes",
            )
    return None


def takes_context(want: Want, node: NodeView) -> Rejected | None:
    length = want.spec.context_length
    for title, geometry in _geometries(want, node):
        most = geometry.max_context
        if most is not None and length > most:
            return Rejected(
                reason="ContextTooLong",
                message=f"spec.contextLength is {length}, the {title} was made for {most} tokens at most",
                need=length,
                have=most,
            )
    return None


def keeps_as_told(want: Want, node: NodeView) -> Rejected | None:
    """Ask whether the model's caches can be what spec.kvCache and a draft model make of them."""
    kept = want.spec.kv_cache or KvCache()
    groups = groups_of(geometry_of(want, node))
    if not groups:
        return None  # nobody knows its layers; the engine will say what it cannot do
    kinds = {group.kind for group in groups}
    sizes = {size for g in groups if g.kind == "Full" for size in (g.head_dim, g.value_dim)}
    if kept.bits is not None and ("Latent" in kinds or not sizes):
        return _unsuited("spec.kvCache.bits", _NOT_PLAIN)
    if kept.bits is not None and any(size % PACKED_TOGETHER for size in sizes):
        shown = " and ".join(map(str, sorted(sizes)))
        why = f"has heads of {shown} numbers, and they are packed {PACKED_TOGETHER} together"
        return _unsuited("spec.kvCache.bits", why)
    if kept.window is not None and ("Latent" in kinds or not sizes):
        return _unsuited("spec.kvCache.window", _NOT_PLAIN)
    for title, shape in _geometries(want, node) if want.spec.model.draft is not None else ():
        if any(group.kind in ("Sliding", "State") for group in groups_of(shape)):
            why = (
                f"needs to take back what was guessed wrong, and the {title} has layers that cannot"
            )
            return Rejected(
                reason="DraftUnsupported", message=f"spec.model.draft {why}; leave it out"
            )
    return None


def _unsuited(field: str, why: str) -> Rejected:
    return Rejected(reason="KvCacheUnsupported", message=f"the model {why}; leave {field} out")


def _geometries(want: Want, node: NodeView) -> Iterator[tuple[str, ModelGeometry]]:
    yield "model", geometry_of(want, node)
    draft = draft_of(want, node)
    if draft is not None:
        yield "draft model", draft


def suits_model(want: Want, node: NodeView) -> Rejected | None:
    """Ask everything about the folders at once: the later questions rely on the earlier ones."""
    return (
        has_all(want, node)
        or is_understood(want, node)
        or takes_context(want, node)
        or keeps_as_told(want, node)
    )


def geometry_of(want: Want, node: NodeView) -> ModelGeometry:
    """Return what the node knows of the model, after `has_all` made sure that it does."""
    geometry = node.models[want.path].geometry
    assert geometry is not None
    return geometry


def draft_of(want: Want, node: NodeView) -> ModelGeometry | None:
    """Return the same of the draft model; None if none is wanted."""
    draft = want.spec.model.draft
    return None if draft is None else node.models[draft.path].geometry


def extras_of(want: Want, node: NodeView) -> Extras:
    """Return what the deployment asks for beside the model, as the node has it."""
    source, kept = want.spec.model, want.spec.kv_cache or KvCache()
    return Extras(
        kv_bits=kept.bits,
        kv_window=kept.window,
        prefix_cache_bytes=quantity.parse(kept.prefix_bytes) if kept.prefix_bytes else 0,
        adapter_bytes=node.adapters[source.adapter].weights_bytes if source.adapter else 0,
        draft=draft_of(want, node),
        draft_tokens=source.draft.tokens if source.draft is not None else 0,
    )


def proof_of(want: Want, node: NodeView) -> MemoryProof:
    """Return what the replica would need if it had the node for itself alone."""
    return prove(
        geometry_of(want, node),
        context_length=want.spec.context_length,
        concurrency=want.spec.concurrency,
        override_bytes=want.override_bytes,
        extras=extras_of(want, node),
    )
