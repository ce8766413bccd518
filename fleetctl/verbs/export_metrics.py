"""The verbs `fleetctl export prometheus`, `alerts` and `grafana`: configuration of programs that watch a fleet."""

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.convert.prometheus.alert_rules import RUNBOOKS, alert_rules
from fleetctl.convert.prometheus.grafana import PAGES, grafana_dashboard
from fleetctl.convert.prometheus.scrape_config import ScrapeAccess, scrape_config
from fleetctl.output.text_file import save_text
from fleetctl.verbs.dashboard import find_dashboard
from manifests.yaml import parser

_output = click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write (default: standard output).",
)


Command = TypeVar("Command", bound=Callable[..., Any])


def _file(flag: str, name: str, help_: str) -> Callable[[Command], Command]:
    """Add a flag that names a file which fleetctl does not read."""
    type_ = click.Path(path_type=PurePosixPath)
    text = f"{help_} (on Prometheus' machine)."
    return click.option(flag, name, type=type_, metavar="PATH", help=text)


_PROMETHEUS_HELP = """Write the scrape config of Prometheus: it finds every process of the fleet through the dashboard.

\b
  fleetctl export prometheus -o prometheus.yml
  fleetctl export prometheus --url https://10.0.0.5:4003 --api-key-file /etc/prometheus/key \\
      --metrics-token-file /etc/prometheus/token --ca-file /etc/prometheus/ca.pem

The file names paths only: no secret is read or written. A dashboard that requires keys asks for an API key with the
role viewer; agents and gateways on other machines ask for the token of their --metrics-token-file, or for a
certificate of the fleet.
"""


@click.command("prometheus", help=_PROMETHEUS_HELP)
@click.option("--url", default="", help="Address of the dashboard (default: the registered one).")
@_file("--api-key-file", "scrape_api_key", "File with an API key for the dashboard")
@_file("--metrics-token-file", "scrape_token", "File with the token for agents and gateways")
@_file("--ca-file", "scrape_ca", "The fleet's CA certificate")
@_file("--cert-file", "scrape_certificate", "A certificate of the fleet")
@_file("--key-file", "scrape_key", "The certificate's private key")
@_output
@store_options
def prometheus(*, url: str, output: Path | None, **options: Any) -> None:
    """Write the scrape config of Prometheus."""
    if (options["scrape_certificate"] is None) != (options["scrape_key"] is None):
        raise click.UsageError("--cert-file and --key-file belong together; give both or none")
    access = ScrapeAccess(
        api_key_file=options["scrape_api_key"],
        metrics_token_file=options["scrape_token"],
        ca_file=options["scrape_ca"],
        certificate_file=options["scrape_certificate"],
        key_file=options["scrape_key"],
    )
    document = scrape_config(url or run(_registered_dashboard(options)), access)
    save_text(parser.dump(document), output)


async def _registered_dashboard(options: dict[str, Any]) -> str:
    async with open_store(options) as transport:
        return await find_dashboard(transport)


_ALERTS_HELP = """Write alert rules for Prometheus.

\b
  fleetctl export alerts -o alerts.yml
  promtool check rules alerts.yml

docs/operations/monitoring.md has a runbook for each alert.
"""


@click.command("alerts", help=_ALERTS_HELP)
@click.option(
    "--runbooks-url",
    default=RUNBOOKS,
    show_default=True,
    help="Address of the page with the runbooks, which each alert links to.",
)
@_output
def alerts(*, runbooks_url: str, output: Path | None) -> None:
    """Write alert rules for Prometheus."""
    save_text(parser.dump(alert_rules(runbooks_url)), output)


@click.command("grafana")
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write into, one JSON file for each dashboard.",
)
def grafana(*, folder: Path) -> None:
    """Write dashboards for Grafana 11 and later: the fleet, a model, a Mac.

    Import them in the browser, or let Grafana read the folder (provisioning). They replace files of the same names.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FleetctlError(f"cannot write {folder}: {error.strerror}") from error
    for page in PAGES:
        path = folder / f"{page.uid}.json"
        save_text(json.dumps(grafana_dashboard(page), indent=2) + "\n", path)
        click.echo(f"{path} written")
