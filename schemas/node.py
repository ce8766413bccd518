"""Node: one Mac; what its agent found out about it, and whether new work may go there."""

from typing import Literal

from pydantic import Field

from schemas.meta import ApiModel, ApiObject, Labels, Status


class ModelGeometry(ApiModel):
    """What the memory proof needs to know of a model (see reconciler/placement/proof.py)."""

    model_type: str
    weights_bytes: int
    """Bytes of the weights as they will lie in memory."""
    layers: int
    kv_heads: int
    head_dim: int
    kv_element_bytes: int
    """Bytes of one number in the KV cache."""
    vocab_size: int
    max_context: int
    """Longest context that the model was made for, in tokens."""


class ModelReport(ApiModel):
    """What a node says of one model that somebody deployed: it has it, or why not."""

    path: str
    """The model's path as the deployment writes it."""
    geometry: ModelGeometry | None = None
    """Set if the model is there and sound."""
    reason: str = ""
    """Why it cannot be used, for machines."""
    message: str = ""
    """Why it cannot be used, for people."""


class NodeSpec(ApiModel):
    """What the fleet's owner decided about a node."""

    unschedulable: bool = False
    """Cordoned: nothing new is placed here; what runs goes on."""


class NodeStatus(Status):
    """What the agent found out."""

    uid: str
    """Stable identity of the node, from its hardware and its name."""
    hostname: str
    address: str
    """Where gateways reach the node's engines."""
    agent_version: str
    os: str
    os_version: str
    machine: str
    chip: str
    cpu_cores: int
    gpu_cores: int
    memory_bytes: int
    """Unified memory of the machine."""
    allocatable_bytes: int
    """What models may use of it."""
    labels: Labels = Field(default_factory=dict)
    """Labels the agent was started with."""
    models: tuple[ModelReport, ...] = ()
    """Every deployed model as this node sees it."""


class Node(ApiObject):
    """One Mac of the fleet."""

    kind: Literal["Node"] = "Node"
    spec: NodeSpec = NodeSpec()
    """What the fleet's owner decided about the node."""
    status: NodeStatus | None = None
    """What its agent found out."""


class NodeLease(ApiModel):
    """The value of a node's lease key; that the key exists is the sign of life."""

    uid: str
    """The node's identity."""
    session: str
    """Tells one run of the agent from the next."""


def effective_labels(node: Node) -> dict[str, str]:
    """Return the labels that selectors match: derived from hardware, the agent's, the owner's."""
    derived: dict[str, str] = {"fleet/node": node.metadata.name}
    given: Labels = {}
    if node.status is not None:
        derived["fleet/os"] = node.status.os
        derived["fleet/chip"] = node.status.chip.replace(" ", "-")
        given = node.status.labels
    return {**derived, **given, **node.metadata.labels}


def matches(labels: dict[str, str], wanted: dict[str, str]) -> bool:
    """Return whether all wanted labels are there."""
    return all(labels.get(key) == value for key, value in wanted.items())
