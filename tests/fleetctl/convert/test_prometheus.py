"""Configuration for Prometheus and Grafana: valid by Prometheus' own tool, and it names what exists."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from fleetctl.convert.prometheus.alert_rules import ALERTS, RUNBOOKS, alert_rules
from fleetctl.convert.prometheus.grafana import PAGES, grafana_dashboard
from tests.support.fleetctl_runner import run_fleetctl

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / RUNBOOKS).read_text()


async def _promtool(*words: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on PATH")
    process = await asyncio.create_subprocess_exec(
        program, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()


async def test_promtool_accepts_rules_and_config(tmp_path: Path) -> None:
    rules, config = tmp_path / "alerts.yml", tmp_path / "prometheus.yml"
    assert (await run_fleetctl("export", "alerts", "-o", str(rules))).code == 0
    found: tuple[str, ...] = ("--api-key-file", "/run/key", "--metrics-token-file", "/run/token")
    found += ("--ca-file", "/run/ca.pem", "--cert-file", "/run/c.pem", "--key-file", "/run/k.pem")
    url = ("--url", "https://10.0.0.5:4003/")
    done = await run_fleetctl("export", "prometheus", *url, *found, "-o", str(config))
    assert (done.code, done.err) == (0, "")
    assert f"{len(ALERTS)} rules found" in await _promtool("check", "rules", str(rules))
    await _promtool("check", "config", "--syntax-only", str(config))
    processes, dashboard = yaml.safe_load(config.read_text())["scrape_configs"]
    assert processes["authorization"] == {"credentials_file": "/run/token"}
    assert dashboard["authorization"] == {"credentials_file": "/run/key"}
    assert processes["http_sd_configs"][0]["authorization"] == {"credentials_file": "/run/key"}
    assert processes["http_sd_configs"][0]["url"] == "https://10.0.0.5:4003/sd/prometheus"


async def test_a_certificate_needs_its_key() -> None:
    done = await run_fleetctl(
        "export", "prometheus", "--url", "http://x:1", "--cert-file", "/c.pem"
    )
    assert done.code == 2
    assert "--cert-file and --key-file belong together" in done.err


async def test_grafana_writes_a_file_for_each_dashboard(tmp_path: Path) -> None:
    done = await run_fleetctl("export", "grafana", "-o", str(tmp_path / "g"))
    assert done.code == 0
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "g").iterdir()}
    assert written.keys() == {page.uid for page in PAGES}
    for model in written.values():
        ids = [panel["id"] for panel in model["panels"]]
        assert len(ids) == len(set(ids))
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in model["panels"]]
        assert len(places) == len(set(places))
        assert all(
            x + panel["gridPos"]["w"] <= 24
            for (x, _), panel in zip(places, model["panels"], strict=True)
        )


async def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = await run_fleetctl("export", "grafana", "-o", str(tmp_path / "file" / "g"))
    assert done.code == 1
    assert "cannot write" in done.err


def test_at_most_twenty_alerts_each_with_a_runbook() -> None:
    assert len(ALERTS) <= 20
    names = re.findall(r"^### (Fleet\w+)$", PAGE, re.MULTILINE)
    assert names == [alert.name for alert in ALERTS]
    rules = alert_rules("https://docs.example/monitoring/")["groups"][0]["rules"]
    assert (
        rules[0]["annotations"]["runbook_url"] == "https://docs.example/monitoring/#fleetnodedown"
    )


def test_variables_are_declared() -> None:
    for page in PAGES:
        model = grafana_dashboard(page)
        declared = {one["name"] for one in model["templating"]["list"]}
        used = set(re.findall(r"\$\{?([a-zA-Z]\w*)", json.dumps(model))) - {"__rate_interval"}
        assert used - {"__all"} <= declared, page.title
