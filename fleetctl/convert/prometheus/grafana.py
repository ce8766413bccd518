"""Dashboards for Grafana 11 and later: the fleet, a model, a Mac.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

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


def _quantiles(metric: str, by: str, where: str) -> tuple[Query, ...]:
    return tuple(
        Query(
            f"histogram_quantile({q}, {_rate(f'{metric}_bucket', f'{by}, le', where)})",
            f"p{q * 100:g} {{{{{by}}}}}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def _stat(title: str, unit: str, expr: str) -> Panel:
    return Panel(title, unit, (Query(expr, ""),), "stat", 4)


_MODEL: Final = '{model=~"$model"}'
_NODE: Final = '{node=~"$node"}'
_RENEWALS: Final = '{operation="keep_alive"}'
_GATEWAY: Final = "fleet_gateway"
PAGES: Final = (
    Page(
        "mlx-fleet",
        "mlx-fleet: fleet",
        (
            _stat(
                "Macs ready",
                "short",
                'count(fleet_condition{kind="Node",type="Ready",status="True"})',
            ),
            _stat("Replicas ready", "short", "sum(fleet_deployment_replicas_ready)"),
            _stat("Replicas desired", "short", "sum(fleet_deployment_replicas_desired)"),
            _stat("Under way", "short", f"sum({_GATEWAY}_in_flight)"),
            _stat("A reconciler leads", "bool_yes_no", "max(fleet_reconciler_leads)"),
            _stat("Store's last word", "s", "min(fleet_store_staleness_seconds)"),
            Panel(
                "Requests by model",
                "reqps",
                (Query(_rate(f"{_GATEWAY}_requests_total", "model"), "{{model}}"),),
            ),
            Panel(
                "Requests by outcome",
                "reqps",
                (Query(_rate(f"{_GATEWAY}_requests_total", "outcome"), "{{outcome}}"),),
            ),
            Panel(
                "Output tokens by model",
                "short",
                (Query(_rate(f"{_GATEWAY}_output_tokens_total", "model"), "{{model}}"),),
            ),
            Panel(
                "First token, 95th percentile",
                "s",
                (
                    Query(
                        f"histogram_quantile(0.95, "
                        f"{_rate(f'{_GATEWAY}_time_to_first_token_seconds_bucket', 'model, le')})",
                        "{{model}}",
                    ),
                ),
            ),
            Panel("GPU by Mac", "percentunit", (Query("fleet_node_gpu_usage_ratio", "{{node}}"),)),
            Panel("CPU by Mac", "percentunit", (Query("fleet_node_cpu_usage_ratio", "{{node}}"),)),
            Panel(
                "Passes of the control loop",
                "ops",
                (
                    Query(
                        _rate("fleet_reconciler_reconciles_total", "kind, result"),
                        "{{kind}} {{result}}",
                    ),
                ),
            ),
            Panel(
                "Replicas that fit on no Mac",
                "short",
                (
                    Query(
                        "max by (deployment) (fleet_reconciler_replicas_unplaced)", "{{deployment}}"
                    ),
                ),
            ),
            Panel(
                "Renewals of leases in etcd, 95th percentile",
                "s",
                (
                    Query(
                        "histogram_quantile(0.95, "
                        f"{_rate('fleet_store_request_seconds_bucket', 'process, le', _RENEWALS)})",
                        "{{process}}",
                    ),
                ),
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
                (
                    Query(
                        'count by (kind, type) (fleet_condition{type=~"Ready|Available|Placed",status!="True"})',
                        "{{kind}} {{type}}",
                    ),
                ),
                width=24,
            ),
        ),
    ),
    Page(
        "mlx-fleet-model",
        "mlx-fleet: model",
        (
            Panel(
                "Requests by outcome",
                "reqps",
                (Query(_rate(f"{_GATEWAY}_requests_total", "outcome", _MODEL), "{{outcome}}"),),
            ),
            Panel(
                "Whole request",
                "s",
                _quantiles(f"{_GATEWAY}_e2e_request_latency_seconds", "model", _MODEL),
            ),
            Panel(
                "First token",
                "s",
                _quantiles(f"{_GATEWAY}_time_to_first_token_seconds", "model", _MODEL),
            ),
            Panel(
                "Time per output token",
                "s",
                _quantiles(f"{_GATEWAY}_time_per_output_token_seconds", "model", _MODEL),
            ),
            Panel(
                "Wait in the queue",
                "s",
                _quantiles(f"{_GATEWAY}_request_queue_time_seconds", "model", _MODEL),
            ),
            Panel(
                "Tokens",
                "short",
                (
                    Query(_rate(f"{_GATEWAY}_prompt_tokens_total", "model", _MODEL), "prompt"),
                    Query(_rate(f"{_GATEWAY}_cached_tokens_total", "model", _MODEL), "cached"),
                    Query(_rate(f"{_GATEWAY}_output_tokens_total", "model", _MODEL), "output"),
                ),
            ),
            Panel(
                "Output tokens by replica",
                "short",
                (
                    Query(
                        _rate(f"{_GATEWAY}_output_tokens_total", "replica", _MODEL), "{{replica}}"
                    ),
                ),
                width=24,
            ),
        ),
        "model",
        f"{_GATEWAY}_requests_total",
    ),
    Page(
        "mlx-fleet-mac",
        "mlx-fleet: Mac",
        (
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
                (Query(f"fleet_engine_kv_cache_usage_ratio{_NODE}", "{{replica}}"),),
            ),
            Panel(
                "Between tokens",
                "s",
                _quantiles("fleet_engine_inter_token_latency_seconds", "replica", _NODE),
            ),
            Panel("Power", "watt", (Query(f"fleet_node_power_watts{_NODE}", "{{node}} {{part}}"),)),
            Panel(
                "Temperature",
                "celsius",
                (Query(f"fleet_node_temperature_celsius{_NODE}", "{{node}} {{sensor}}"),),
            ),
            Panel(
                "Network",
                "Bps",
                (
                    Query(
                        _rate("fleet_node_network_received_bytes_total", "node", _NODE),
                        "in {{node}}",
                    ),
                    Query(
                        _rate("fleet_node_network_sent_bytes_total", "node", _NODE), "out {{node}}"
                    ),
                ),
            ),
            Panel(
                "Disk",
                "Bps",
                (
                    Query(
                        _rate("fleet_node_disk_read_bytes_total", "node", _NODE), "read {{node}}"
                    ),
                    Query(
                        _rate("fleet_node_disk_written_bytes_total", "node", _NODE),
                        "written {{node}}",
                    ),
                ),
            ),
            Panel(
                "Restarts of engines",
                "short",
                (Query(f"fleet_agent_engine_restarts{_NODE}", "{{replica}}"),),
            ),
        ),
        "node",
        "fleet_agent_uptime_seconds",
    ),
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
