"""Alert rules of a fleet for Prometheus. Each has a runbook in docs/operations/monitoring.md."""

from dataclasses import dataclass
from typing import Any, Final, Literal

RUNBOOKS: Final = "docs/operations/monitoring.md"
"""The page that has a section for each alert, below the root of the source tree."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule: it fires after `expr` has had a result for `hold`."""

    name: str
    expr: str
    hold: str
    severity: Literal["critical", "warning"]
    summary: str


def _condition(kind: str, type_: str, *, is_bad: str) -> str:
    """Return the objects whose condition has a bad status; a new reason of the same status is no change."""
    labels = f'kind="{kind}",type="{type_}",status=~"{is_bad}"'
    return f"max by (name) (fleet_condition{{{labels}}})"


_NOT_TRUE: Final = "False|Unknown"
ALERTS: Final = (
    Alert(
        "FleetNodeDown",
        _condition("Node", "Ready", is_bad=_NOT_TRUE),
        "1m",
        "critical",
        "Mac {{ $labels.name }} is not Ready.",
    ),
    Alert(
        "FleetNodeThermalPressure",
        _condition("Node", "ThermalPressure", is_bad="True"),
        "10m",
        "warning",
        "Mac {{ $labels.name }} is too hot and slows down.",
    ),
    Alert(
        "FleetNodePressure",
        'max by (name, type) (fleet_condition{kind="Node",type=~"MemoryPressure|DiskPressure",status="True"})',
        "5m",
        "warning",
        "Mac {{ $labels.name }} is short of memory or disk space ({{ $labels.type }}).",
    ),
    Alert(
        "FleetEngineCrashLoop",
        "max by (node, replica) (fleet_agent_engine_restarts) >= 3",
        "1m",
        "critical",
        "The engine of {{ $labels.replica }} on {{ $labels.node }} ends again and again.",
    ),
    Alert(
        "FleetDeploymentUnavailable",
        _condition("ModelDeployment", "Available", is_bad=_NOT_TRUE),
        "10m",
        "critical",
        "Deployment {{ $labels.name }} has fewer ready replicas than it needs.",
    ),
    Alert(
        "FleetDeploymentPending",
        _condition("ModelDeployment", "Placed", is_bad="False"),
        "10m",
        "warning",
        "Replicas of deployment {{ $labels.name }} fit on no Mac.",
    ),
    Alert(
        "FleetRolloutFailed",
        'max by (name) (fleet_condition{kind="ModelDeployment",type="Progressing",reason=~"CanaryFailed|Stalled"})',
        "1m",
        "warning",
        "The rollout of {{ $labels.name }} has stopped.",
    ),
    Alert(
        "FleetObjectiveMissed",
        'max by (deployment, objective) (fleet_objective_burn_rate{window="1h"}) > 6'
        ' and max by (deployment, objective) (fleet_objective_burn_rate{window="24h"}) > 1',
        "5m",
        "critical",
        "{{ $labels.deployment }} uses the error budget of {{ $labels.objective }} more than six times too fast.",
    ),
    Alert(
        "FleetErrorRate",
        'sum by (model) (rate(fleet_gateway_requests_total{outcome=~"failed|interrupted"}[5m]))'
        " / sum by (model) (rate(fleet_gateway_requests_total[5m])) > 0.05",
        "5m",
        "critical",
        "More than 5 % of the requests for {{ $labels.model }} fail.",
    ),
    Alert(
        "FleetQueueFull",
        "sum by (reason) (rate(fleet_gateway_queue_refused_total[5m])) > 0",
        "5m",
        "warning",
        "Gateways refuse requests because queues are full ({{ $labels.reason }}).",
    ),
    Alert(
        "FleetEngineEjected",
        "max by (replica) (fleet_gateway_endpoint_breaker) == 2",
        "5m",
        "warning",
        "Gateways send nothing to {{ $labels.replica }}: its answers failed.",
    ),
    Alert(
        "FleetStreamsNotResumed",
        'sum by (model) (increase(fleet_gateway_requests_total{outcome="interrupted"}[10m])) > 0',
        "1m",
        "warning",
        "Streams of {{ $labels.model }} broke off: no other engine continued them.",
    ),
    Alert(
        "FleetNoLeader",
        "max(fleet_reconciler_leads) == 0",
        "30s",
        "critical",
        "No reconciler leads: nothing is placed or replaced.",
    ),
    Alert(
        "FleetStoreStale",
        "min(fleet_store_staleness_seconds) > 30",
        "30s",
        "critical",
        "etcd does not answer.",
    ),
    Alert(
        "FleetStoreSpace",
        "max(fleet_store_db_bytes) / min(fleet_store_quota_bytes) > 0.8 or max(fleet_store_alarms) > 0",
        "5m",
        "critical",
        "etcd is nearly full: at its quota nothing in the fleet can change.",
    ),
    Alert(
        "FleetGitSourceFailed",
        _condition("GitSource", "Ready", is_bad="False"),
        "10m",
        "warning",
        "The fleet does not follow Git source {{ $labels.name }}.",
    ),
    Alert(
        "FleetVersionSkew",
        "count(count by (release) (fleet_process_info)) > 1",
        "1h",
        "warning",
        "Processes of the fleet have {{ $value }} different releases.",
    ),
    Alert(
        "FleetShardGroupUnstable",
        "changes(fleet_replica_epoch[30m]) > 3",
        "1m",
        "warning",
        "The Macs of {{ $labels.replica }} form their group again and again.",
    ),
    Alert(
        "FleetCertificateExpires",
        "max by (process, node, instance) (fleet_identity_renewal_failing) == 1",
        "1h",
        "critical",
        "The {{ $labels.process }} at {{ $labels.instance }} cannot renew its certificate.",
    ),
    Alert(
        "FleetGatewaySilent",
        "max(fleet_dashboard_gateways_silent) > 0",
        "5m",
        "warning",
        "{{ $value }} gateways do not show their requests to the dashboard.",
    ),
)


def alert_rules(runbooks_url: str) -> dict[str, Any]:
    """Return the document for `rule_files`; `runbooks_url` is the address of the page of runbooks."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "runbook_url": f"{runbooks_url}#{alert.name.lower()}",
            },
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "mlx-fleet", "rules": rules}]}
