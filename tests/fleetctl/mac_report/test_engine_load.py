"""Measurements around a real engine."""

from pathlib import Path

import pytest

from fleetctl.mac_report.engine_load import measure_engine
from fleetctl.mac_report.mac_programs import MacPlace, MacPrograms
from machinery.clock import SystemClock
from tests.support import mac_transcripts, tiny_model


def programs_of(tmp_path: Path) -> MacPrograms:
    mac_transcripts.install(tmp_path / "bin", mac_transcripts.transcripts())
    return MacPrograms(MacPlace(programs=tmp_path / "bin"), SystemClock())


@pytest.mark.mlx
async def test_an_engine_is_measured_and_ended(tmp_path: Path) -> None:
    model = tiny_model.make(tmp_path / "models" / "tiny")
    memory = await measure_engine(programs_of(tmp_path), model, 0.1)
    assert memory.footprint > memory.weights > 0
    assert memory.thermal_before == memory.thermal_after == 0
    assert memory.wired_before == memory.wired_loaded == memory.wired_after_kill == 251554 * 16384


async def test_an_engine_that_does_not_start_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "models" / "none").mkdir(parents=True)
    with pytest.raises(OSError, match="the engine on none: "):
        await measure_engine(programs_of(tmp_path), tmp_path / "models" / "none", 0.1)
