"""ModelPolicy: which repositories of a hub clients may ask for by name although no ModelDeployment declares them."""

import hashlib
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from schemas.duration import Duration
from schemas.meta import ApiModel, ApiObject, Examples, ObjectName, Status, object_name
from schemas.quantity import PositiveQuantity
from schemas.records import Role

ON_DEMAND_LABEL: Final = "fleet/on-demand"
"""Label of a ModelDeployment that was created on demand; its value is the name of the ModelPolicy."""
MAX_REFUSALS: Final = 50

HubOwner = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=96)]
License = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]*$", max_length=64),
    Examples(("apache-2.0", "mit", "llama3.1")),
]


class OnDemand(ApiModel):
    """Repositories that clients may ask for, and the bounds of what they cause."""

    owners: Annotated[tuple[HubOwner, ...], Field(min_length=1, max_length=100)]
    """Owners of repositories: the part before the slash, such as "mlx-community"."""
    licenses: Annotated[tuple[License, ...], Field(min_length=1, max_length=100)]
    """Licences as the model card names them, such as "apache-2.0". A model whose card names none is refused."""
    max_size: PositiveQuantity
    """Most bytes of the files of one model, such as "20Gi"."""
    max_total_size: PositiveQuantity
    """Most bytes of the files of all models of this policy."""
    max_models: Annotated[int, Field(ge=1, le=1000)] = 10
    """Most models of this policy at once."""
    role: Role = "user"
    """Least role of an API key that may ask for a new model. A gateway that requires no keys lets every client ask, as
    users."""
    new_models_per_hour: Annotated[int, Field(ge=1, le=1000)] = 5
    """New models that one API key (or all clients without one) may ask for in an hour, at each gateway."""
    unused_for: Duration = "24h"
    """Time without a request after which a model's ModelDeployment is deleted. Its files follow once a disk needs room."""
    idle_time: Duration = "15m"
    """`spec.autoscaling.idleTime` of the ModelDeployments."""
    context_length: Annotated[int, Field(ge=16, le=16_777_216)] = 4096
    """`spec.contextLength` of the ModelDeployments."""
    pools: Annotated[tuple[ObjectName, ...], Field(max_length=100)] = ()
    """`spec.placement.pools` of the ModelDeployments. Default: every Mac."""


class ModelPolicySpec(ApiModel):
    """Rules for models that no ModelDeployment declares."""

    on_demand: OnDemand
    """Models of a hub that are deployed at the first request that names them."""


class OnDemandRefusal(ApiModel):
    """The reason why a repository that a client asked for is not deployed."""

    repo: str
    reason: str
    message: str
    at: datetime
    """Time of the decision; it is made anew for a request after ten minutes, or after a change of the policy."""


class ModelPolicyStatus(Status):
    """The observed state of a policy; written by the reconciler."""

    models: int = 0
    """ModelDeployments that exist by this policy."""
    total_bytes: int = 0
    """Bytes of their files."""
    refusals: Annotated[tuple[OnDemandRefusal, ...], Field(max_length=MAX_REFUSALS)] = ()
    """The last refused repositories."""


class ModelPolicy(ApiObject):
    """Rules for models of a hub that clients may ask for by name, without a ModelDeployment."""

    kind: Literal["ModelPolicy"] = "ModelPolicy"
    spec: ModelPolicySpec
    """Rules for models that no ModelDeployment declares."""
    status: ModelPolicyStatus | None = None
    """The observed state; written by the reconciler."""


def policy_for(policies: Iterable[ModelPolicy], repo: str) -> ModelPolicy | None:
    """Return the policy that decides about a repository: the first by name that names its owner; None without one."""
    owner = repo.partition("/")[0].casefold()
    return min(
        (
            policy
            for policy in policies
            if policy.metadata.deletion_timestamp is None
            and any(owner == named.casefold() for named in policy.spec.on_demand.owners)
        ),
        key=lambda policy: policy.name,
        default=None,
    )


def on_demand_name(repo: str) -> ObjectName:
    """Return the name of the ModelDeployment of a repository: gateways and the reconciler derive the same."""
    digest = hashlib.sha256(repo.encode()).hexdigest()[:8]
    return f"{object_name(repo, 'model')[:60].rstrip('-.')}-{digest}"
