"""The chip table: every row as it was sold, and what is asked of it."""

import pytest

from schemas import chips
from schemas.chips import CHIPS, GIB, Chip, Designation


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Apple M1", Designation(generation=1, variant="")),
        ("Apple M4 Pro", Designation(generation=4, variant="Pro")),
        (" Apple  M3 Ultra ", Designation(generation=3, variant="Ultra")),
        ("Apple M6 Max", Designation(generation=6, variant="Max")),
        ("Apple M12", Designation(generation=12, variant="")),
        ("Apple M1 (Virtual)", None),
        ("Apple processor", None),
        ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", None),
        ("", None),
    ],
)
def test_designation(name: str, expected: Designation | None) -> None:
    assert chips.parse_designation(name) == expected


@pytest.mark.parametrize(
    ("name", "gpu_cores", "memory_gib", "bandwidth_gbps"),
    [
        pytest.param("Apple M4 Max", 32, 36, 410, id="bin-by-cores"),
        pytest.param("Apple M4 Max", 40, 64, 546, id="larger-bin-by-cores"),
        pytest.param("Apple M4 Max", None, 128, 546, id="bin-by-memory"),
        pytest.param("Apple M4 Max", 40, 36, 546, id="cores-win-over-memory"),
        pytest.param("Apple M4 Max", 20, 48, 546, id="odd-cores-then-memory"),
        pytest.param("Apple M4 Max", None, None, 410, id="neither-is-the-slower"),
        pytest.param("Apple M3 Max", 30, 96, 300, id="m3-max"),
        pytest.param("Apple M5 Max", 40, 128, 614, id="m5-max"),
        pytest.param("Apple M1", 7, 8, 68.25, id="one-row"),
        pytest.param("Apple M1", 99, 99, 68.25, id="one-row-whatever-else"),
    ],
)
def test_find(
    name: str, gpu_cores: int | None, memory_gib: int | None, bandwidth_gbps: float
) -> None:
    memory_bytes = memory_gib * GIB if memory_gib else None
    found = chips.find_chip(name, gpu_cores=gpu_cores, memory_bytes=memory_bytes)
    assert found is not None
    assert (found.name, found.bandwidth_gbps) == (name, bandwidth_gbps)


@pytest.mark.parametrize(
    "name", ["Apple M6 Max", "Apple M4 Ultra", "Apple M5 Ultra", "Apple M1 (Virtual)", "M4", ""]
)
def test_a_chip_that_is_not_listed_is_none(name: str) -> None:
    assert chips.find_chip(name, gpu_cores=40, memory_bytes=64 * GIB) is None


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"{chip.name}-{chip.gpu_cores[-1]}")
def test_every_row_is_whole(chip: Chip) -> None:
    assert chips.parse_designation(chip.name) is not None
    for options in (chip.cpu_cores, chip.gpu_cores, chip.memory_gib):
        assert options
        assert list(options) == sorted(set(options))
        assert options[0] > 0
    assert chip.bandwidth_gbps > 0
    for cores in chip.gpu_cores:
        for gib in chip.memory_gib:
            assert chips.find_chip(chip.name, gpu_cores=cores, memory_bytes=gib * GIB) == chip


def test_rdma_is_exactly_thunderbolt_5() -> None:
    capable = {chip.name.removeprefix("Apple ") for chip in CHIPS if chip.rdma_capable}
    assert capable == {"M3 Ultra", "M4 Pro", "M4 Max", "M5 Pro", "M5 Max"}
