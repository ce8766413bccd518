"""Revision: what a deployment's replicas ran once, kept to go back to."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.deployment import KvCache, ModelSource, Resources, ServedName, Sharding
from schemas.meta import ApiModel, ApiObject, ObjectName


class Template(ApiModel):
    """All of a deployment's spec that an engine is started with: when it changes, replicas roll."""

    model: ModelSource
    served_names: tuple[ServedName, ...] = ()
    context_length: int
    concurrency: int
    queue_depth: int | None = None
    kv_cache: KvCache | None = None
    resources: Resources | None = None
    sharding: Sharding = "Never"
    restarted_at: str = ""
    """What `fleetctl rollout restart` wrote: nothing but a reason to start engines anew."""


class RevisionSpec(ApiModel):
    """One version of a deployment."""

    deployment: ObjectName
    template: str
    """Hash of the template."""
    revision: Annotated[int, Field(ge=1)]
    """Counts up; one that is gone back to becomes the newest again."""
    content: Template
    """What its replicas run."""
    change_cause: str = ""
    """Why there is it: the deployment's annotation kubernetes.io/change-cause when it was new, else what differed."""


class Revision(ApiObject):
    """What a deployment's replicas ran once."""

    kind: Literal["Revision"] = "Revision"
    spec: RevisionSpec
