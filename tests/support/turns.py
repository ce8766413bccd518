"""Which test files are begun first: the long ones, or one process runs the last of them alone.

In an order in which work runs beside waiting, as measured; a file that is not named comes later.
"""

from pathlib import Path

_FIRST: tuple[str, ...] = (
    "fleet/test_shard.py",
    "nodeagent/test_agent.py",
    "fleetctl/test_demo.py",
    "fleetctl/test_up.py",
    "fleetctl/test_verbs.py",
    "fleet/test_rollout.py",
    "engine/ranks/test_group.py",
    "nodeagent/test_agent_survival.py",
    "store/chaos/test_fuzz.py",
    "fleet/test_scaling.py",
    "fleetctl/test_rollout.py",
    "simulation/test_processes.py",
    "simulation/test_seeds_a.py",
    "store/chaos/test_cluster.py",
    "fleet/test_kill_each.py",
    "store/chaos/test_partition.py",
    "store/chaos/test_far_behind.py",
    "engine/test_fuzz.py",
    "reconciler/test_controller.py",
    "fleetctl/test_backup.py",
    "store/test_users.py",
    "fleet/test_refusals.py",
    "fleet/test_interruptions.py",
    "engine/test_imports.py",
    "simulation/test_seeds_b.py",
    "store/etcd/member/test_embedded.py",
    "engine/test_process.py",
    "fleetctl/test_drain.py",
    "store/test_election.py",
    "fleetctl/test_growth.py",
    "store/chaos/test_history.py",
    "fleet/test_auth.py",
    "gateway/test_failover.py",
    "nodeagent/test_geometry_mlx.py",
    "store/test_informer.py",
    "fleet/test_chat.py",
    "store/test_contract.py",
    "schemas/test_kinds.py",
    "fleetctl/test_care.py",
    "reconciler/test_plan_properties.py",
    "nodeagent/test_starting.py",
    "fleet/test_node_loss.py",
    "store/test_tls.py",
    "manifests/test_apply.py",
    "store/etcd/member/test_maintenance.py",
    "fleetctl/test_bad_input.py",
    "engine/test_serving.py",
    "engine/test_embeddings.py",
    "manifests/test_load.py",
    "fleetctl/test_node_verbs.py",
    "store/chaos/test_compaction.py",
    "manifests/test_bad_files.py",
    "engine/batch/test_batch.py",
    "gateway/handover/test_processes.py",
    "reconciler/placement/test_table.py",
    "reconciler/test_quiethours.py",
    "test_house_rules.py",
)
_TURNS = {Path("tests", name): number for number, name in enumerate(_FIRST)}


def turn(path: Path) -> int:
    """Return the turn of a test file, given from the project's folder."""
    return _TURNS.get(path, len(_TURNS))
