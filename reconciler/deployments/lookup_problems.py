"""The reasons why hub models could not be resolved: the leader's memory, from the lookups to the conditions."""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.deployment import HubReference, ModelDeployment
from schemas.meta import ObjectKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupProblem:
    """The reason why the model of a deployment could not be resolved."""

    source: HubReference
    reason: str
    message: str
    failures: int = 1


class LookupProblems:
    """The problems of the last lookups, by deployment: the leader's memory, which a new leader starts empty."""

    def __init__(self, on_change: Callable[[ObjectKey], None] = lambda _: None) -> None:
        """`on_change` gets the deployment whose status must be written again."""
        self._on_change = on_change
        self._by_name: dict[str, LookupProblem] = {}

    def find(self, deployment: ModelDeployment) -> LookupProblem | None:
        """Return the problem of the reference that the deployment has now."""
        problem = self._by_name.get(deployment.name)
        return (
            problem if problem is not None and problem.source == deployment.spec.model.hub else None
        )

    def remember(self, name: str, source: HubReference, reason: str, message: str) -> LookupProblem:
        """Remember a failure, and return it with the number of failures in a row."""
        before = self._by_name.get(name)
        is_same = before is not None and before.source == source
        failures = before.failures + 1 if before is not None and is_same else 1
        lookup_problem = LookupProblem(
            source=source, reason=reason, message=message, failures=failures
        )
        self._by_name[name] = lookup_problem
        if before is None or (before.reason, before.message) != (reason, message):
            self._on_change(ObjectKey("ModelDeployment", name))
        return lookup_problem

    def forget(self, name: str) -> None:
        """Forget the problem of a deployment that was resolved, or is gone."""
        if self._by_name.pop(name, None) is not None:
            self._on_change(ObjectKey("ModelDeployment", name))
