"""A small fleet for the dashboard's tests: Macs with models and room, a deployment that runs, and one that is pending."""

import hashlib
from datetime import timedelta

from schemas.deployment import ModelDeployment
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec
from schemas.records import ApiKey, Role
from store import codec, keys
from store.port import Put, Transport
from tests.support.dashboards import CLOCK
from tests.support.fleetctl_manifests import put_replica
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.world import deployment

MACS = (("mac-1", 24, "Apple M4"), ("mac-2", 16, "Apple M4 Pro"), ("mac-3", 8, "Apple M4"))

MANIFEST = """\
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata:
  name: small
spec:
  model:
    path: qwen
  replicas: 1
  contextLength: 2048
  concurrency: 1
"""


def pending() -> ModelDeployment:
    """Return a deployment that fits on no Mac, and would with a shorter context."""
    model_deployment = deployment(name="long", context_length=8192)
    return model_deployment.model_copy(
        update={"spec": model_deployment.spec.model_copy(update={"concurrency": 128})}
    )


async def put_fleet(store: Transport) -> None:
    """Write three Macs, `qwen` with one of two replicas on mac-1, and `long`, which fits nowhere."""
    for name, gib, chip in MACS:
        node = Node(
            metadata=ObjectMeta(name=name, uid=f"uid-{name}", generation=1), spec=NodeSpec()
        )
        await store.commit([], [codec.put_spec(node), *_mac(name, gib, chip)])
    owner = deployment(name="qwen", replicas=2)
    await store.commit([], [codec.put_spec(owner), put_replica(owner, 0, "mac-1")])
    await store.commit([], [codec.put_spec(pending())])


def _mac(name: str, gib: int, chip: str) -> list[Put]:
    return [put_node(name, node_status(name, memory_gib=gib, chip=chip)), put_lease(name)]


def api_key(name: str, role: Role, secret: str, *, life_s: float | None = None) -> ApiKey:
    """Return an API key that ends after so many seconds; one in the past with a negative number."""
    digest, now = hashlib.sha256(secret.encode()).hexdigest(), CLOCK.now()
    expires = None if life_s is None else now + timedelta(seconds=life_s)
    return ApiKey(name=name, hash=digest, created=now, expires=expires, role=role)


def put_api_key(key: ApiKey) -> Put:
    return Put(key=keys.named(keys.API_KEY_PREFIX, key.name), value=codec.encode(key))


def put_key(role: Role) -> Put:
    """Return the write of an API key `sk-ROLE` with this role, named as the role."""
    return put_api_key(api_key(role, role, f"sk-{role}"))
