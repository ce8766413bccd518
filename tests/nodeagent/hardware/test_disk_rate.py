"""The disk's read rate: measured when a model has experts that memory cannot hold, and kept."""

from pathlib import Path

from machinery.clock import SystemClock
from nodeagent.hardware.disk_rate import DiskRate
from schemas.node import ModelReport, NodeStatus
from tests.support.reconciler_agents import node_status
from tests.support.world import GEOMETRY


def status(*, expert_bytes: int, weights_bytes: int) -> NodeStatus:
    sizes = {"expert_bytes": expert_bytes, "weights_bytes": weights_bytes}
    report = ModelReport(path="moe", geometry=GEOMETRY.model_copy(update=sizes))
    base: NodeStatus = node_status("mac-1", memory_gib=8)
    return base.model_copy(update={"models": (report,)})


async def test_the_rate_is_measured_for_experts_beyond_memory_and_kept(tmp_path: Path) -> None:
    models, state = tmp_path / "models", tmp_path / "state"
    models.mkdir()
    state.mkdir()
    rate = DiskRate(models, state, SystemClock())
    # A model without experts, and one that fits, need no rate.
    for other in (
        status(expert_bytes=0, weights_bytes=9 << 30),
        status(expert_bytes=6 << 30, weights_bytes=7 << 30),
    ):
        assert (await rate.fill(other)).disk_read_gbps == 0.0
    assert list(state.iterdir()) == []
    large = status(expert_bytes=8 << 30, weights_bytes=9 << 30)
    measured = (await rate.fill(large)).disk_read_gbps
    assert 0.0 < measured < 1000.0
    assert list(models.iterdir()) == []
    # The next run reads the file; that of another disk is measured anew.
    assert (
        await DiskRate(models, state, SystemClock()).fill(node_status("mac-1"))
    ).disk_read_gbps == measured
    other_disk = DiskRate(tmp_path, state, SystemClock())
    assert (await other_disk.fill(node_status("mac-1"))).disk_read_gbps == 0.0


async def test_a_disk_that_cannot_be_written_has_no_rate_and_a_damaged_file_counts_as_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk-rate.json").write_text('{"models_dir": 1}')
    rate = DiskRate(tmp_path / "none", tmp_path, SystemClock())
    large = status(expert_bytes=8 << 30, weights_bytes=9 << 30)
    assert (await rate.fill(large)).disk_read_gbps == 0.0
