"""Reading of objects as trees (the values of JSON): joins spec and status. Validates no field and imports no models.

`fleetctl get` reads with it: pydantic's models take five times as long to import as the whole command. Typed objects
come from `store.objects`; `tests/store/test_objects.py` compares the two. Functions that read take any `StoreReader`.
"""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from machinery.gc_pause import pause_collection
from store import keys, reads, versions
from store.errors import NewerDocumentError, UndecodableError
from store.reads import KeyValue, Listing, StoreReader

# As `fleetctl get -o json` prints it: camelCase, without the stored version.
Tree: TypeAlias = dict[str, Any]

T = TypeVar("T")

API_VERSION = "fleet/v1alpha1"

_LEASED_PREFIXES = {
    "Endpoint": keys.ENDPOINT_PREFIX,
    "Event": keys.EVENT_PREFIX,
    "FabricTest": keys.FABRIC_TEST_PREFIX,
}
_KINDS_WITHOUT_STATUS = frozenset({*_LEASED_PREFIXES, "Revision"})
# Those of other kinds are read otherwise, or not in the order in which they are shown.
PAGED_KINDS = frozenset(
    {
        "ModelDeployment",
        "Replica",
        "Revision",
        "NodePool",
        "ShardGroup",
        "ModelRoute",
        "ModelPolicy",
        "GitSource",
    }
)
"""Kinds whose objects `convert_all` reads by name."""
# Documents that are parsed at once.
_AT_ONCE = 500
# The order of schemas.meta.ObjectMeta.
_METADATA = (
    *("name", "labels", "annotations", "uid", "generation", "resourceVersion"),
    *("creationTimestamp", "deletionTimestamp", "finalizers", "ownerReferences", "managedFields"),
)
NEW_NODE = {"unschedulable": False, "draining": False, "taints": [], "awakeUntil": None}
"""The spec that the reconciler writes for a node that joins."""


async def list_all(store: StoreReader, kind: str) -> list[Tree]:
    """Return all objects of a kind with their statuses, by name; events by time.

    Raises:
        UndecodableError: one of them is not a valid document, or a newer mlx-fleet wrote it.
        StoreError: no answer.

    """
    if kind == "Node":
        return await _nodes(store)
    if kind == "ApiKey":
        items = (await store.list(keys.API_KEY_PREFIX)).items
        return [api_key_tree(decode(item, "ApiKey"), item.mod_revision) for item in items]
    trees = list(chain.from_iterable(await convert_all(store, kind, list[Tree])))
    trees.sort(key=name_of)
    if kind == "Event":
        trees.sort(key=_last_seen)
    return trees


async def convert_all(
    store: StoreReader, kind: str, convert: Callable[[Sequence[Tree]], T]
) -> list[T]:
    """Return what `convert` makes of the objects of each page, with their statuses, so that no two pages are kept.

    For all kinds but Node and ApiKey; objects are in the order of their keys. Raises as `list_all` does.
    """
    statuses: dict[str, KeyValue] = {}
    if kind not in _KINDS_WITHOUT_STATUS:
        # As bytes, which take a quarter of the memory of their trees.
        listed = (await store.list(keys.status_prefix(kind))).items
        statuses = {keys.kind_and_name(item.key)[1]: item for item in listed}

    def join(page: Listing) -> T:
        trees = _decode_all(page.items, kind, of_item)
        pairs = [(tree, statuses.get(name_of(tree))) for tree in trees]
        there = [(tree, item) for tree, item in pairs if item is not None]
        found = _decode_all([item for _, item in there], f"{kind}Status", decode)
        for (tree, _), status in zip(there, found, strict=True):
            tree["status"] = status
        return convert(trees)

    prefix = _LEASED_PREFIXES.get(kind) or keys.spec_prefix(kind)
    return await reads.collect_converted(lambda: store.pages(prefix), join)


async def get(store: StoreReader, kind: str, name: str) -> Tree | None:
    """Return one object; None if it does not exist. Raises as `list_all` does."""
    if kind in ("Node", "ApiKey"):
        return next((one for one in await list_all(store, kind) if name_of(one) == name), None)
    if kind in _LEASED_PREFIXES:
        # Their keys begin with the writer's name, which the object's name does not tell.
        trees = [tree for tree in await list_all(store, kind) if name_of(tree) == name]
        return max(trees, key=lambda tree: int(tree["metadata"]["resourceVersion"]), default=None)
    item = await store.get(keys.spec_key(kind, name))
    if item is None:
        return None
    tree = of_item(item, kind)
    if kind in _KINDS_WITHOUT_STATUS:
        return tree
    return with_status(tree, await store.get(keys.status_key(kind, name)), kind)


async def ready_nodes(store: StoreReader) -> frozenset[str]:
    """Return the nodes whose agents renew their leases."""
    leases = (await store.list(keys.NODE_LEASE_PREFIX)).items
    return frozenset(item.key.removeprefix(keys.NODE_LEASE_PREFIX) for item in leases)


def _decode_all(items: Sequence[KeyValue], model: str, finish: Callable[..., Tree]) -> list[Tree]:
    """Return what `finish` (`of_item` or `decode`) makes of each document; raises as it does."""
    found: list[Tree] = []
    # The garbage collector would traverse all trees again and again, at several times the cost of parsing.
    with pause_collection():
        for at in range(0, len(items), _AT_ONCE):
            part = items[at : at + _AT_ONCE]
            trees = _parse_together(part, model)
            if (
                trees is None
            ):  # one of them has another version, or is damaged: `finish` tells which
                found += [finish(item, model) for item in part]
            else:
                pairs = zip(part, trees, strict=True)
                found += [finish(item, model, tree) for item, tree in pairs]
    return found


def _parse_together(items: Sequence[KeyValue], model: str) -> list[Tree] | None:
    """Return the trees of documents of the current version; None if one of them is anything else.

    Parsed as one array, they share the names of their members, which are half of their memory.
    """
    current = versions.version_of(model)
    texts: list[bytes] = []
    for item in items:
        version, text = versions.split_version(item.value)
        if version != current or not (text.startswith(b"{") and text.endswith(b"}")):
            return None
        texts.append(text)
    try:
        trees = json.loads(b"[" + b",".join(texts) + b"]")
    except (ValueError, RecursionError):
        return None
    is_whole = len(trees) == len(items) and all(isinstance(tree, dict) for tree in trees)
    return trees if is_whole else None


def of_item(item: KeyValue, kind: str, parsed: Tree | None = None) -> Tree:
    """Return the object under a spec key, with its resourceVersion; `parsed` is its document, if it is known.

    Raises:
        UndecodableError: it is not a valid document.

    """
    tree = decode(item, kind, parsed)
    metadata = tree.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise _undecodable(item, kind, "has no metadata.name")
    if not isinstance(tree.get("spec", {}), dict):
        raise _undecodable(item, kind, "its spec is not an object")
    metadata = {**metadata, "resourceVersion": str(item.mod_revision)}
    # Empty values are defaults, which are left out.
    tree["metadata"] = {part: metadata[part] for part in _METADATA if metadata.get(part)}
    return tree


def with_status(tree: Tree, item: KeyValue | None, kind: str) -> Tree:
    """Return the object with the status from its status key; raises as `of_item` does."""
    return tree if item is None else {**tree, "status": decode(item, f"{kind}Status")}


def decode(item: KeyValue, model: str, parsed: Tree | None = None) -> Tree:
    """Return a document. `model` is the name of its type.

    `parsed` is the document if it is known already.

    Raises:
        NewerDocumentError: a newer mlx-fleet wrote it.
        UndecodableError: it is not a valid document.

    """
    if parsed is not None:
        return parsed
    try:
        raw = versions.unstamp(item.value, versions.version_of(model))
        tree = json.loads(raw)
    except versions.VersionError as error:
        kind = NewerDocumentError if error.is_newer else UndecodableError
        raise kind(f"{item.key} ({model}): {error}") from error
    except (ValueError, RecursionError) as error:
        raise _undecodable(item, model, f"is not JSON ({error})") from error
    if not isinstance(tree, dict):
        raise _undecodable(item, model, "is not an object")
    return tree


def _undecodable(item: KeyValue, model: str, what: str) -> UndecodableError:
    return UndecodableError(
        f"{item.key} ({model}): {what}. It was written by another version of mlx-fleet or by hand; "
        "run the newer version, or delete the key"
    )


def name_of(tree: Tree) -> str:
    return str(tree["metadata"]["name"])


def conditions_of(tree: Tree) -> list[Tree]:
    """Return the conditions in an object's status; none without a status."""
    found = (tree.get("status") or {}).get("conditions") or ()
    return [one for one in found if isinstance(one, dict)]


def condition(tree: Tree, type_: str) -> Tree | None:
    """Return the condition of that type; None means unknown."""
    return next((one for one in conditions_of(tree) if one.get("type") == type_), None)


def is_true(tree: Tree, type_: str) -> bool:
    """Return whether the condition is present and true."""
    found = condition(tree, type_)
    return found is not None and found.get("status") == "True"


def without_managed_fields(tree: Tree, *, managed_fields: bool = False) -> Tree:
    """Return the object as `get -o yaml` and `-o json` print it: without `managedFields`, unless requested."""
    if managed_fields or "managedFields" not in tree.get("metadata", ()):
        return tree
    metadata = {part: v for part, v in tree["metadata"].items() if part != "managedFields"}
    return {**tree, "metadata": metadata}


def parse_time(text: object) -> datetime | None:
    """Return a document's time; None if the text is not one."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _last_seen(tree: Tree) -> datetime:
    time = parse_time((tree.get("spec") or {}).get("lastSeen"))
    return time or datetime.min.replace(tzinfo=UTC)


def api_key_tree(stored: Tree, mod_revision: int = 0) -> Tree:
    """Return an API key in the form of an object, without its hashes, which no reader needs."""
    metadata = {
        "name": stored["name"],
        "resourceVersion": str(mod_revision),
        "creationTimestamp": stored.get("created"),
    }
    spec = {part: v for part, v in stored.items() if part not in ("name", "hash", "created")}
    spec["previous"] = [{"expires": one["expires"]} for one in stored.get("previous", ())]
    for part in ("previous", "modelLimits"):
        if not spec.get(part):
            spec.pop(part, None)
    return {"apiVersion": API_VERSION, "kind": "ApiKey", "metadata": metadata, "spec": spec}


async def _nodes(store: StoreReader) -> list[Tree]:
    """Return the nodes with condition Ready, which is computed from their leases.

    A lease is the truth about a node; a stored condition would lag behind it.
    """
    specs = (await store.list(keys.spec_prefix("Node"))).items
    found = {name_of(tree): tree for tree in (of_item(item, "Node") for item in specs)}
    for item in (await store.list(keys.status_prefix("Node"))).items:
        _, name = keys.kind_and_name(item.key)
        # A node that just joined has a status before the reconciler has written its spec.
        new = {
            "apiVersion": API_VERSION,
            "kind": "Node",
            "metadata": {"name": name},
            "spec": NEW_NODE,
        }
        found[name] = with_status(found.get(name) or new, item, "Node")
    ready = await ready_nodes(store)
    lives = {
        item.key.removeprefix(keys.NODE_LIFE_PREFIX): decode(item, "NodeLifeStatus")
        for item in (await store.list(keys.NODE_LIFE_PREFIX)).items
    }
    return [
        _with_ready_condition(found[name], lives.get(name) or {}, is_ready=name in ready)
        for name in sorted(found)
    ]


def _with_ready_condition(node: Tree, life: Tree, *, is_ready: bool) -> Tree:
    status = node.get("status")
    if status is None:
        return node
    generation = node["metadata"].get("generation", 0)
    ready = {
        "type": "Ready",
        "status": "True" if is_ready else "False",
        "reason": "LeaseHeld" if is_ready else "LeaseLost",
        "message": "" if is_ready else "its agent does not renew its lease",
        "observedGeneration": generation,
    }
    # The reconciler knows since when the node is Ready or not; the lease knows whether it is.
    layers = [conditions_of(node), conditions_of({"status": life}), [ready]]
    trees: dict[str, Tree] = {}
    for one in (one for layer in layers for one in layer):
        new, old = dict(one), trees.get(str(one.get("type")))
        if old is not None and old.get("status") == new.get("status"):
            since = old.get("lastTransitionTime")
            new.pop("lastTransitionTime", None)
            new |= {} if since is None else {"lastTransitionTime": since}
        trees[str(new.get("type"))] = new
    conditions = [trees[type_] for type_ in sorted(trees)]
    judged = {**status, "observedGeneration": generation, "conditions": conditions}
    return {**node, "status": judged}


def field_at(tree: Any, *path: str) -> Any:
    """Return the value at a path of a tree; None if it does not exist."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
