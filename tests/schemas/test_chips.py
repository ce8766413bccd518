"""Tests of `schemas.chips`: the table of chips, points and size tiers."""

import pytest

from schemas import chips
from schemas.chips import CHIPS, GIB, Chip, Designation
from tests.support.values import present


@pytest.mark.parametrize(("name", "expected"), [
    ("Apple M1", Designation(generation=1, variant="")),
    ("Apple M4 Pro", Designation(generation=4, variant="Pro")),
    (" Apple  M3 Ultra ", Designation(generation=3, variant="Ultra")),
    ("Apple M6 Max", Designation(generation=6, variant="Max")),
    ("Apple M12", Designation(generation=12, variant="")),
    ("Apple M1 (Virtual)", None), ("Apple processor", None),
    ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", None),
    ("", None),
])  # fmt: skip
def test_generation_and_variant_are_read_from_name(name: str, expected: Designation | None) -> None:
    assert chips.parse_designation(name) == expected


@pytest.mark.parametrize(("name", "gpu_cores", "memory_gib", "bandwidth_gbps"), [
    pytest.param("Apple M4 Max", 32, 36, 410, id="bin-by-cores"),
    pytest.param("Apple M4 Max", 40, 64, 546, id="larger-bin-by-cores"),
    pytest.param("Apple M4 Max", None, 128, 546, id="bin-by-memory"),
    pytest.param("Apple M4 Max", 40, 36, 546, id="cores-win-over-memory"),
    pytest.param("Apple M4 Max", 20, 48, 546, id="odd-cores-then-memory"),
    pytest.param("Apple M4 Max", None, None, 410, id="neither-is-the-slower"),
    pytest.param("Apple M3 Max", 30, 96, 300, id="m3-max"),
    pytest.param("Apple M5 Max", 40, 128, 614, id="m5-max"),
    pytest.param("Apple M5 Ultra", 64, 256, 1200, id="m5-ultra"),
    pytest.param("Apple M6", 12, 16, 153, id="bins-of-memory-with-equal-cores"),
    pytest.param("Apple M6", 12, 32, 170, id="the-larger-of-them"),
    pytest.param("Apple M1", 7, 8, 68.25, id="one-row"),
    pytest.param("Apple M1", 99, 99, 68.25, id="one-row-whatever-else"),
])  # fmt: skip
def test_a_machine_finds_its_row(
    name: str, gpu_cores: int | None, memory_gib: int | None, bandwidth_gbps: float
) -> None:
    memory_bytes = memory_gib * GIB if memory_gib else None
    chip = present(chips.find_chip(name, gpu_cores=gpu_cores, memory_bytes=memory_bytes))
    assert (chip.name, chip.bandwidth_gbps) == (name, bandwidth_gbps)


@pytest.mark.parametrize(
    "name", ["Apple M6 Max", "Apple M4 Ultra", "Apple M7", "Apple M1 (Virtual)", "M4", ""]
)
def test_a_chip_that_is_not_listed_is_none(name: str) -> None:
    assert chips.find_chip(name, gpu_cores=40, memory_bytes=64 * GIB) is None


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"{chip.name}-{chip.gpu_cores[-1]}")
def test_every_row_is_complete(chip: Chip) -> None:
    assert chips.parse_designation(chip.name) is not None
    for options in (chip.cpu_cores, chip.gpu_cores, chip.memory_gib):
        assert options
        assert list(options) == sorted(set(options))
        assert options[0] > 0
    assert chip.bandwidth_gbps > 0
    for cores in chip.gpu_cores:
        for gib in chip.memory_gib:
            assert chips.find_chip(chip.name, gpu_cores=cores, memory_bytes=gib * GIB) == chip


@pytest.mark.parametrize(("name", "points"), [
    ("Apple M1", 10), ("Apple M1 Ultra", 40), ("Apple M2 Pro", 25), ("Apple M3 Max", 40),
    ("Apple M4 Max", 45), ("Apple M5", 30), ("Apple M5 Ultra", 60),
    pytest.param("Apple M6 Max", 55, id="a-newer-generation-continues-the-line"),
    pytest.param("Apple M5 Mega", 30, id="an-unknown-variant-is-the-plain-chip"),
    pytest.param("Apple M1 (Virtual)", 0, id="a-virtual-machine"),
    ("Intel Xeon", 0), ("", 0),
])  # fmt: skip
def test_chip_points(name: str, points: int) -> None:
    assert chips.chip_points(name) == points


@pytest.mark.parametrize(("chip", "gpu_cores", "memory_gib", "points"), [
    pytest.param("Apple M5 Ultra", 80, 512, 228, id="the-best-mac-that-was-sold"),
    pytest.param("Apple M1", 8, 16, 10 + 4 + 4, id="m1"),
    pytest.param("Apple M2 Ultra", 76, 192, 45 + 38 + 48, id="m2-ultra"),
    pytest.param("Apple M3 Max", 40, 128, 40 + 20 + 32, id="m3-max"),
    pytest.param("Apple M4 Pro", 20, 48, 35 + 10 + 12, id="m4-pro"),
    pytest.param("Intel", 0, 16, 4, id="memory-alone"),
    pytest.param("", 0, 0, 0, id="nothing-known"),
])  # fmt: skip
def test_machine_points_count_memory_in_gib(
    chip: str, gpu_cores: int, memory_gib: int, points: float
) -> None:
    found = chips.machine_points(chip=chip, gpu_cores=gpu_cores, memory_bytes=memory_gib * GIB)
    assert found == points


@pytest.mark.parametrize(("billions", "gpu_cores", "gib"), [
    (70, 30, 64), (30, 30, 64), (29, 20, 32), (13, 20, 32), (7, 15, 16), (3, 10, 8), (0.5, 8, 8),
])  # fmt: skip
def test_size_tier(billions: float, gpu_cores: int, gib: int) -> None:
    tier = present(chips.size_tier(int(billions * 10**9)))
    assert (tier.min_gpu_cores, tier.min_memory_bytes) == (gpu_cores, gib * GIB)


def test_a_model_of_unknown_size_has_no_tier_and_fits_every_mac() -> None:
    assert chips.size_tier(0) is None
    assert chips.meets_tier(None, gpu_cores=0, memory_bytes=0)


@pytest.mark.parametrize(("gpu_cores", "memory_bytes", "expected"), [
    pytest.param(40, 64 * GIB, True, id="exactly-enough"),
    pytest.param(40, 65 * 10**9, False, id="65e9-bytes-are-less-than-64-gib"),
    pytest.param(29, 64 * GIB, False, id="too-few-cores"),
    pytest.param(0, 0, False, id="nothing-known"),
])  # fmt: skip
def test_meets_the_tier_of_30_billion(gpu_cores: int, memory_bytes: int, expected: bool) -> None:
    tier = chips.size_tier(30 * 10**9)
    assert chips.meets_tier(tier, gpu_cores=gpu_cores, memory_bytes=memory_bytes) is expected


@pytest.mark.parametrize(("gpu_cores", "gib", "tiers"), [
    (80, 512, ("30B+", "13B-30B", "7B-13B", "3B-7B", "<3B")),
    (20, 48, ("13B-30B", "7B-13B", "3B-7B", "<3B")),
    (10, 16, ("3B-7B", "<3B")), (8, 8, ("<3B",)), (0, 64, ()),
])  # fmt: skip
def test_a_mac_supports_tiers(gpu_cores: int, gib: int, tiers: tuple[str, ...]) -> None:
    assert chips.supported_tiers(gpu_cores=gpu_cores, memory_bytes=gib * GIB) == tiers
