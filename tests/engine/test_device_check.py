"""The device check's measurement of a chip that is not listed, on MLX's CPU backend."""

import json
from pathlib import Path

import pytest

from engine import device_check

pytestmark = pytest.mark.mlx
NAME = "memory-bandwidth.json"


def test_a_new_chip_is_measured_once(tmp_path: Path) -> None:
    measurement = tmp_path / "state" / NAME
    assert device_check.copy_gbps("Apple M4 Pro", tmp_path / "state") == 0
    assert not measurement.exists(), "a listed chip is not measured"
    measured = device_check.copy_gbps("Apple M9", tmp_path / "state")
    assert measured > 0
    assert json.loads(measurement.read_text()) == {"chip": "Apple M9", "copyGbps": measured}
    measurement.write_text('{"chip": "Apple M9", "copyGbps": 321.5}')
    assert device_check.copy_gbps("Apple M9", tmp_path / "state") == 321.5


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"chip": "Apple M9"}', '{"chip": "Apple M8", "copyGbps": 1.5}',
        '{"chip": "Apple M9", "copyGbps": -1}', '{"chip": "Apple M9", "copyGbps": Infinity}',
        '{"chip": "Apple M9", "copyGbps": "fast"}',
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_or_of_another_chip_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert device_check.kept_gbps("Apple M9", tmp_path / NAME) is None
