"""The table of retry loops in docs/operations/store.md is complete, and no loop waits without backoff unseen."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.syntax import nodes

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "operations" / "store.md"
ROOMS = (
    "machinery",
    "store",
    "identity",
    "manifests",
    "models",
    "compat",
    "reconciler",
    "nodeagent",
    "insight",
    "dashboard",
    "fleetctl",
)
LOOPS = (*ROOMS, "gateway", "engine")

# Waits that repeat nothing that failed: periods, polls of own children and files, and answers to users.
PERIODS = {
    "nodeagent/api/cable_listeners.py": "looks for cables that came or went",
    "nodeagent/hardware/machine_sleep.py": "polls the sleep of its own machine",
    "nodeagent/node/power.py": "waits for its own machine, and for its network after a wake",
    "nodeagent/node/load_report.py": "looks at the load every ten seconds",
    "nodeagent/peers/shared_sources.py": "polls the files of peers while one of them receives",
    "compat/routes.py": "sends figures every two seconds",
    "dashboard/store_probe.py": "asks the store twice a second",
    "dashboard/fleet_model.py": "collects changes before it shows them",
    "dashboard/collector.py": "asks gateways every second and agents every ten seconds",
    "dashboard/history/object_recorder.py": "looks for due changes every second",
    "dashboard/record_views.py": "collects changes before it shows them",
    "insight/usage_samples.py": "lets time pass between two samples",
    "dashboard/objectives.py": "judges objectives twice a minute",
    "dashboard/history/recorder.py": "samples every ten seconds",
    "dashboard/history/writer.py": "hands over batches every two seconds",
    "dashboard/updates.py": "compares the Macs once a second",
    "fleetctl/discovery/local_network.py": "listens for a while",
    "fleetctl/discovery/search.py": "waits for its backoff, which it compares with its deadline",
    "fleetctl/doctor/observe.py": "looks a second time at what may still be under way",
    "fleetctl/doctor/observe_links.py": "looks at what its own listener has heard, for ten seconds at most",
    "fleetctl/fleets/lifecycle.py": "polls the end of own processes",
    "fleetctl/fleets/local_fleet.py": "polls the start and end of own processes",
    "fleetctl/fleets/join_client.py": "waits as long as the join port asks for, or for its backoff",
    "insight/process_client.py": "lets a TLS connection close",
    "fleetctl/maintenance/fleet_down.py": "polls the end of gateways for six seconds",
    "fleetctl/maintenance/upgrade.py": "looks whether a program that it restarted goes on",
    "fleetctl/mac_report/collect.py": "measures how soon launchd loads a job again",
    "fleetctl/mac_report/engine_load.py": "polls the start of its own engine",
    "fleetctl/mac_report/mac_programs.py": "polls the end of own jobs and their files",
    "fleetctl/objects/waits.py": "polls the progress of a command until its timeout",
    "fleetctl/services/installer.py": "polls whether a program that it started goes on",
    "fleetctl/services/launchd.py": "polls the start and end of a job",
    "fleetctl/simulate/simulated_fleet.py": "lets simulated time pass",
    "fleetctl/verbs/chat.py": "polls a gateway's list of models until its timeout",
    "fleetctl/verbs/run_hub_model.py": "polls the progress of a command",
    "fleetctl/verbs/get.py": "collects changes before it shows them",
    "fleetctl/verbs/models.py": "shows the progress of a fetch",
    "fleetctl/verbs/models_fleet.py": "polls the progress of a command",
    "fleetctl/verbs/models_quantize.py": "polls the progress of a command",
    "fleetctl/verbs/secure.py": "polls the progress of a command until its timeout",
    "fleetctl/verbs/status.py": "shows the fleet again at the interval that the user gave",
    "fleetctl/verbs/top.py": "samples at the interval that the user gave",
    "fleetctl/verbs/wait.py": "polls, with pauses in proportion to the cost of a look",
    "identity/credentials.py": "polls files for changes",
    "identity/renewal.py": "looks whether its certificate is due",
    "identity/signing_controller.py": "limits its rate, and sweeps once a minute",
    "identity/trust_sync.py": "asks the store once a minute whether it is there",
    "machinery/clock.py": "the clock itself",
    "machinery/control_loop.py": "waits for keys that are due",
    "machinery/log_rotation.py": "looks at the size of own logs",
    "machinery/mdns.py": "looks at the interfaces every ten seconds",
    "machinery/process_log.py": "polls a file",
    "machinery/processes.py": "polls the end of a process",
    "machinery/state_disk.py": "looks at the disk of its own state at an interval",
    "machinery/supervisor.py": "polls the end of a process",
    "store/etcd/space.py": "asks etcd for its size every 30 seconds",
    "machinery/tls_server.py": "polls files for changes",
    "machinery/virtual_time.py": "the clock of tests and simulations",
    "models/hub/bandwidth.py": "limits its rate",
    "models/hub/blob_download.py": "polls the file of another fetch, and waits as long as a hub asks for",
    "models/hub/fetcher.py": "polls the end of another fetch on its machine",
    "nodeagent/model_store/collector.py": "looks at the disk about once a minute",
    "nodeagent/model_store/quantizations.py": "polls the files of its own converter",
    "nodeagent/engines/engine_logs.py": "polls a file",
    "nodeagent/engines/prefix_folders.py": "looks for deployments that are gone",
    "nodeagent/hardware/load.py": "samples the load of its own machine every ten seconds",
    "nodeagent/hollow/__main__.py": "spreads the start of agents",
    "nodeagent/hollow/engines.py": "simulates the work of engines",
    "reconciler/deployments/demand/scraper.py": "requests metrics once a second, answered or not",
    "reconciler/controller.py": "lets a status arrive after the end of a lease",
    "reconciler/services/power.py": "looks once a second which Macs may sleep",
    "reconciler/event_handlers.py": "collects changes before it acts",
    "reconciler/services/gitops/fetcher.py": "measures the memory of the fetch process",
    "reconciler/services/fabric/checker.py": "looks which checks are due, and whether a replica came",
    "reconciler/services/fabric/runs.py": "polls the progress of a test",
    "reconciler/services/join/port.py": "answers every refused token after the same time",
    "reconciler/services/kept_records.py": "collects changes before it writes them",
    "store/events.py": "collects events before it writes them",
    "reconciler/services/change_retention.py": "removes old records once an hour",
    "reconciler/services/on_demand.py": "looks for requested models every second",
    "store/etcd/authentication.py": "waits for the end of its backoff",
    "store/etcd/member/embedded.py": "polls the start of its own etcd",
    "store/etcd/member/maintenance.py": "looks at its own etcd every five seconds",
    "store/leases.py": "renews three times per time to live",
}

# Delays of another kind, or of work on the own machine, which has no peer that many processes share.
WITHOUT_JITTER = {
    "nodeagent/replicas/engine_tracker.py": "starts and probes the engines of its own Mac",
    "reconciler/groups/epochs.py": "counts the rest of a delay that the epoch's own status holds",
}


def _modules(rooms: tuple[str, ...]) -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    """Yield name and nodes of every module of the rooms."""
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), nodes(path)


def _called(node: ast.AST) -> str:
    """Return the name of the function that the node calls; "" if it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def declared_backoffs() -> set[tuple[str, str, str]]:
    """Return file, base and cap of every `Backoff(...)` in the tree."""
    found = set()
    for name, module in _modules(LOOPS):
        for node in module:
            if isinstance(node, ast.Call) and _called(node) == "Backoff":
                given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
                base, cap = given.get("first_s", 0.05), given.get("limit_s", 1.0)
                found.add((name, f"{base:g} s", f"{cap:g} s"))
    return found


def listed_backoffs() -> set[tuple[str, str, str]]:
    """Return the same from the table of the docs."""
    rows = re.findall(
        r"^\| .+ \| `([a-z_/]+\.py)` \| ([\d.]+ s) \| ([\d.]+ s) \|",
        TABLE.read_text(),
        re.MULTILINE,
    )
    return set(rows)


def test_the_docs_list_every_retry_loop() -> None:
    assert declared_backoffs() == listed_backoffs()


def test_no_wait_without_backoff_is_unseen() -> None:
    """A `sleep` whose time is no backoff's stands in a file that the table above explains."""
    found = set()
    for name, module in _modules(ROOMS):
        for node in module:
            if isinstance(node, ast.Call) and _called(node) == "sleep":
                argument = node.args[0]
                is_backoff = _called(argument) in ("delay_s", "next_delay_s")
                if not is_backoff and getattr(argument, "value", None) != 0:
                    found.add(name)
    assert found - PERIODS.keys() == set(), "use machinery.backoff.Retries, or explain the period"
    assert PERIODS.keys() - found == set(), "these files no longer wait"


def test_every_backoff_is_jittered() -> None:
    """`delay_s` without a jitter makes the processes of a fleet retry at the same moments."""
    wrong = []
    for name, module in _modules(ROOMS):
        for node in module:
            if not isinstance(node, ast.Call) or _called(node) != "delay_s":
                continue
            if "jitter" not in {keyword.arg for keyword in node.keywords}:
                wrong.append(name)
    assert set(wrong) - WITHOUT_JITTER.keys() == set()
