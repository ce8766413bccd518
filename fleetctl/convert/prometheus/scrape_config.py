"""The scrape config of Prometheus for a fleet."""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

JOB: Final = "mlx-fleet"
_INTERVAL: Final = "15s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeAccess:
    """Credentials of Prometheus: paths of files on its machine, None for those it does not need."""

    api_key_file: PurePosixPath | None = None
    """An API key with the role viewer: a dashboard that requires keys asks for it."""
    metrics_token_file: PurePosixPath | None = None
    """The token that agents and gateways were given with --metrics-token-file."""
    ca_file: PurePosixPath | None = None
    """The fleet's CA certificate."""
    certificate_file: PurePosixPath | None = None
    key_file: PurePosixPath | None = None
    """A certificate of the fleet and its private key: engines and agents accept it instead of the token."""


def scrape_config(dashboard_url: str, access: ScrapeAccess) -> dict[str, Any]:
    """Return the document for `scrape_configs`: one job that finds its processes, and one for the dashboard.

    https://prometheus.io/docs/prometheus/latest/configuration/configuration/#http_sd_config
    """
    files = {
        "ca_file": access.ca_file,
        "cert_file": access.certificate_file,
        "key_file": access.key_file,
    }
    given = {name: str(path) for name, path in files.items() if path is not None}
    tls = {"tls_config": given} if given else {}
    from_dashboard = {**_bearer(access.api_key_file), **tls}
    discovery = {
        "url": f"{dashboard_url.rstrip('/')}/sd/prometheus",
        "refresh_interval": _INTERVAL,
        **from_dashboard,
    }
    job = {"scrape_interval": _INTERVAL, "http_sd_configs": [discovery]}
    is_dashboard = {"source_labels": ["process"], "regex": "dashboard"}
    return {
        "scrape_configs": [
            {
                "job_name": JOB,
                **job,
                **_bearer(access.metrics_token_file),
                **tls,
                "relabel_configs": [{**is_dashboard, "action": "drop"}],
            },
            {
                "job_name": f"{JOB}-dashboard",
                **job,
                **from_dashboard,
                "relabel_configs": [{**is_dashboard, "action": "keep"}],
            },
        ]
    }


def _bearer(path: PurePosixPath | None) -> dict[str, Any]:
    return {} if path is None else {"authorization": {"credentials_file": str(path)}}
