"""Dashboards for Grafana 11 and later: the fleet, a model, a Mac.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

_SOURCE: Final = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_SCHEMA: Final = 39
_COLUMNS: Final = 24
_HEIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and the text of its legend."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture; `unit` is one of Grafana's, `width` one of 24 columns."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 12


@dataclass(frozen=True, slots=True)
class Page:
    """A dashboard; `variable` is the label that its reader chooses a value of, `of` the metric that has it."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    variable: str = ""
    of: str = ""


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))"


def _rates(metric: str, by: str, where: str = "") -> tuple[Query, ...]:
    return (Query(_rate(metric, by, where), _legend(by)),)


def _quantiles(
    metric: str, by: str, where: str = "", shares: Sequence[float] = (0.5, 0.95, 0.99)
) -> tuple[Query, ...]:
    rate = _rate(f"{metric}_bucket", f"{by}, le", where)
    return tuple(
        Query(
            f"histogram_quantile({share}, {rate})",
            _legend(by) if len(shares) == 1 else f"p{share * 100:g} {_legend(by)}",
        )
        for share in shares
    )


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by.split(", "))


def _values(expr: str, by: str) -> tuple[Query, ...]:
    return (Query(expr, _legend(by)),)


def _stat(title: str, unit: str, expr: str) -> Panel:
    return Panel(title, unit, (Query(expr, ""),), "stat", 4)


_MODEL: Final = '{model=~"$model"}'
_NODE: Final = '{node=~"$node"}'
_RENEWALS: Final = '{operation="keep_alive"}'
_READY: Final = '{kind="Node",type="Ready",status="True"}'
_UNMET: Final = '{type=~"Ready|Available|Placed",status!="True"}'
_GATEWAY: Final = "fleet_gateway"
_FLEET: Final = (
    _stat("Macs ready", "short", f"count(fleet_condition{_READY})"),
    _stat("Replicas ready", "short", "sum(fleet_deployment_replicas_ready)"),
    _stat("Replicas desired", "short", "sum(fleet_deployment_replicas_desired)"),
    _stat("Under way", "short", f"sum({_GATEWAY}_in_flight)"),
    _stat("A reconciler leads", "bool_yes_no", "max(fleet_reconciler_leads)"),
    _stat("Store's last word", "s", "min(fleet_store_staleness_seconds)"),
    Panel("Requests by model", "reqps", _rates(f"{_GATEWAY}_requests_total", "model")),
    Panel("Requests by outcome", "reqps", _rates(f"{_GATEWAY}_requests_total", "outcome")),
    Panel("Output tokens by model", "short", _rates(f"{_GATEWAY}_output_tokens_total", "model")),
    Panel(
        "First token, 95th percentile",
        "s",
        _quantiles(f"{_GATEWAY}_time_to_first_token_seconds", "model", shares=[0.95]),
    ),
    Panel("GPU by Mac", "percentunit", _values("fleet_node_gpu_usage_ratio", "node")),
    Panel("CPU by Mac", "percentunit", _values("fleet_node_cpu_usage_ratio", "node")),
    Panel(
        "Passes of the control loop",
        "ops",
        _rates("fleet_reconciler_reconciles_total", "kind, result"),
    ),
    Panel(
        "Replicas that fit on no Mac",
        "short",
        _values("max by (deployment) (fleet_reconciler_replicas_unplaced)", "deployment"),
    ),
    Panel(
        "Renewals of leases in etcd, 95th percentile",
        "s",
        _quantiles("fleet_store_request_seconds", "process", _RENEWALS, shares=[0.95]),
    ),
    Panel(
        "Space of etcd",
        "bytes",
        (
            Query("max(fleet_store_db_bytes)", "file"),
            Query("max(fleet_store_db_in_use_bytes)", "in use"),
            Query("min(fleet_store_quota_bytes)", "quota"),
        ),
    ),
    Panel(
        "Conditions that are not True",
        "short",
        _values(f"count by (kind, type) (fleet_condition{_UNMET})", "kind, type"),
        width=24,
    ),
)
_ONE_MODEL: Final = (
    Panel("Requests by outcome", "reqps", _rates(f"{_GATEWAY}_requests_total", "outcome", _MODEL)),
    *(
        Panel(title, "s", _quantiles(f"{_GATEWAY}_{metric}_seconds", "model", _MODEL))
        for title, metric in (
            ("Whole request", "e2e_request_latency"),
            ("First token", "time_to_first_token"),
            ("Time per output token", "time_per_output_token"),
            ("Wait in the queue", "request_queue_time"),
        )
    ),
    Panel(
        "Tokens",
        "short",
        tuple(
            Query(_rate(f"{_GATEWAY}_{kind}_tokens_total", "model", _MODEL), kind)
            for kind in ("prompt", "cached", "output")
        ),
    ),
    Panel(
        "Output tokens by replica",
        "short",
        _rates(f"{_GATEWAY}_output_tokens_total", "replica", _MODEL),
        width=24,
    ),
)
_ONE_MAC: Final = (
    Panel(
        "Processors",
        "percentunit",
        (
            Query(f"fleet_node_cpu_usage_ratio{_NODE}", "CPU {{node}}"),
            Query(f"fleet_node_gpu_usage_ratio{_NODE}", "GPU {{node}}"),
        ),
    ),
    Panel(
        "Memory of the machine",
        "bytes",
        (
            Query(f"fleet_agent_memory_total_bytes{_NODE}", "all {{node}}"),
            Query(f"fleet_agent_memory_available_bytes{_NODE}", "available {{node}}"),
            Query(f"fleet_agent_memory_allocatable_bytes{_NODE}", "for models {{node}}"),
            Query(f"fleet_node_swap_used_bytes{_NODE}", "swap {{node}}"),
        ),
    ),
    Panel(
        "Memory of engines",
        "bytes",
        (
            Query(f"fleet_agent_engine_peak_bytes{_NODE}", "peak {{replica}}"),
            Query(f"fleet_agent_engine_proven_bytes{_NODE}", "proof {{replica}}"),
        ),
    ),
    Panel(
        "KV caches in use",
        "percentunit",
        _values(f"fleet_engine_kv_cache_usage_ratio{_NODE}", "replica"),
    ),
    Panel(
        "Between tokens",
        "s",
        _quantiles("fleet_engine_inter_token_latency_seconds", "replica", _NODE),
    ),
    Panel("Power", "watt", _values(f"fleet_node_power_watts{_NODE}", "node, part")),
    Panel(
        "Temperature", "celsius", _values(f"fleet_node_temperature_celsius{_NODE}", "node, sensor")
    ),
    *(
        Panel(
            title,
            "Bps",
            tuple(
                Query(
                    _rate(f"fleet_node_{metric}_bytes_total", "node", _NODE), f"{word} {{{{node}}}}"
                )
                for word, metric in directions
            ),
        )
        for title, directions in (
            ("Network", (("in", "network_received"), ("out", "network_sent"))),
            ("Disk", (("read", "disk_read"), ("written", "disk_written"))),
        )
    ),
    Panel(
        "Restarts of engines", "short", _values(f"fleet_agent_engine_restarts{_NODE}", "replica")
    ),
)
PAGES: Final = (
    Page("mlx-fleet", "mlx-fleet: fleet", _FLEET),
    Page("mlx-fleet-model", "mlx-fleet: model", _ONE_MODEL, "model", f"{_GATEWAY}_requests_total"),
    Page("mlx-fleet-mac", "mlx-fleet: Mac", _ONE_MAC, "node", "fleet_agent_uptime_seconds"),
)


def grafana_dashboard(page: Page) -> dict[str, Any]:
    """Return the JSON model of a dashboard, for Grafana's import or its folder of provisioned dashboards."""
    return {
        "uid": page.uid,
        "title": page.title,
        "tags": ["mlx-fleet"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables(page)},
        "panels": _layout(page.panels),
    }


def _variables(page: Page) -> list[dict[str, Any]]:
    source = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource"}
    variables: list[dict[str, Any]] = [{**source, "query": "prometheus"}]
    if page.variable:
        variables.append(
            {
                "name": page.variable,
                "type": "query",
                "datasource": _SOURCE,
                "query": f"label_values({page.of}, {page.variable})",
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return variables


def _layout(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Return the panels in rows from left to right."""
    layout, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        height = _HEIGHT // 2 if panel.kind == "stat" else _HEIGHT
        if x + panel.width > _COLUMNS:
            x, y = 0, y + _HEIGHT
        layout.append(
            {
                "id": number,
                "title": panel.title,
                "type": panel.kind,
                "datasource": _SOURCE,
                "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(ord("A") + at),
                        "datasource": _SOURCE,
                        "expr": query.expr,
                        "legendFormat": query.legend,
                    }
                    for at, query in enumerate(panel.queries)
                ],
            }
        )
        x += panel.width
    return layout
