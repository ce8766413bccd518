"""`fleetctl cluster-info`: the addresses of a fleet, and whether its parts are there."""

from fleetctl.verbs.cluster_info import FleetSummary, summary_text


def test_a_whole_fleet() -> None:
    fleet_summary = FleetSummary(
        etcd="http://mac-1:2379",
        etcd_version="3.5.21",
        leader="mac-1/77",
        gateways={"9f3a": "http://mac-1:4000/"},
        nodes=3,
        ready_nodes=2,
        deployments=4,
        available_deployments=4,
        tls="strict: plain HTTP is refused",
    )
    assert summary_text(fleet_summary) == (
        "etcd           http://mac-1:2379 (version 3.5.21)\n"
        "reconciler     mac-1/77 leads\n"
        "gateway 9f3a   http://mac-1:4000/v1\n"
        "tls            strict: plain HTTP is refused\n"
        "nodes          2 of 3 are Ready\n"
        "deployments    4 of 4 are Available\n\n"
        "`fleetctl doctor` checks every part; `fleetctl support-bundle` collects what a helper needs."
    )
