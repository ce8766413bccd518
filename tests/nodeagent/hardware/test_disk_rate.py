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
    rate = DiskRate(tmp_path, SystemClock())
    # A model without experts, and one that fits, need no rate.
    for other in (
        status(expert_bytes=0, weights_bytes=9 << 30),
        status(expert_bytes=6 << 30, weights_bytes=7 << 30),
    ):
        assert (await rate.fill(other, None)).disk_read_gbps == 0.0
    large = status(expert_bytes=8 << 30, weights_bytes=9 << 30)
    measured = await rate.fill(large, None)
    assert 0.0 < measured.disk_read_gbps < 1000.0
    assert list(tmp_path.iterdir()) == []
    # A later run takes it from the store as long as the disk is the same.
    small = node_status("mac-1")
    assert (await DiskRate(tmp_path, SystemClock()).fill(small, measured)) == small.model_copy(
        update={"disk_read_gbps": measured.disk_read_gbps}
    )
    other_disk = small.model_copy(update={"disk_bytes": 1 << 40})
    filled = await DiskRate(tmp_path, SystemClock()).fill(other_disk, measured)
    assert filled.disk_read_gbps == 0.0


async def test_a_disk_that_cannot_be_written_has_no_rate(tmp_path: Path) -> None:
    large = status(expert_bytes=8 << 30, weights_bytes=9 << 30)
    filled = await DiskRate(tmp_path / "none", SystemClock()).fill(large, None)
    assert filled.disk_read_gbps == 0.0
