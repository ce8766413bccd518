"""DiskPressure of the disk with the agent's state, where it is not that of the models."""

from datetime import UTC, datetime

import pytest

from nodeagent.hardware.readings import DiskReading, MachineReading
from nodeagent.node.machine_conditions import DISK_PRESSURE, MachineHistory, next_history
from schemas.meta import find_condition

GIB = 2**30


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "expected"),
    [
        pytest.param(400, (3, 1, 0.9, 1.9, 2, 1.5), "FFTTFF", id="large"),
        pytest.param(1, (0.2, 0.09, 0.19, 0.21), "FTTF", id="small"),
    ],
)
def test_a_full_disk_of_the_state_folder_is_pressure(
    total_gib: int, free_gib: tuple[float, ...], expected: str
) -> None:
    history, now = MachineHistory(), datetime(2026, 1, 1, tzinfo=UTC)
    found, messages = "", []
    for free in free_gib:
        reading = MachineReading(
            disk=DiskReading(path="/models", total_bytes=400 * GIB, free_bytes=300 * GIB),
            state_disk=DiskReading(
                path="/state", total_bytes=total_gib * GIB, free_bytes=int(free * GIB)
            ),
        )
        history = next_history(reading, history, now, has_engines=False)
        condition = find_condition(history.conditions, DISK_PRESSURE)
        assert condition is not None
        found += condition.status.value[0]
        messages.append(condition.message)
    assert found == expected
    assert "the disk of /state, where the agent and its engines write" in messages[found.index("T")]
