"""Tests of `schemas.quantity`: bytes as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from schemas import quantity

adapter: TypeAdapter[str] = TypeAdapter(quantity.Quantity)


@pytest.mark.parametrize(("text", "expected"), [
    ("0", 0), ("1024", 1024), ("007", 7), ("1k", 1000), ("1Ki", 1024), ("1.5G", 1_500_000_000),
    ("0.5Gi", 2**29), ("96Gi", 96 * 2**30), ("2T", 2 * 10**12), ("2Ti", 2**41), ("3M", 3_000_000),
    ("3Mi", 3 * 2**20), ("1.9", 1),
])  # fmt: skip
def test_valid_quantities_are_parsed(text: str, expected: int) -> None:
    assert quantity.parse(adapter.validate_python(text)) == expected


@pytest.mark.parametrize("text", [
    "", "Gi", "-1", "+1", "1 Gi", "1g", "1K", "1kB", "1GB", ".5G", "1.G", "1e3", "1,5G", "1Gi\n",
    "\N{ARABIC-INDIC DIGIT ONE}",
])  # fmt: skip
def test_invalid_quantities_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity.parse(text)
    with pytest.raises(ValidationError):
        adapter.validate_python(text)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5G"])
def test_oversized_numbers_are_refused_by_validation(text: str) -> None:
    """If a NodePool could hold it, the reconciler would fail on it each time."""
    with pytest.raises(ValidationError, match="at most 32"):
        adapter.validate_python(text)


@given(st.from_regex(r"\A[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?\Z").filter(lambda t: len(t) <= 32))
def test_every_accepted_quantity_can_be_parsed(text: str) -> None:
    assert quantity.parse(adapter.validate_python(text)) >= 0


@given(st.integers(0, 10**15), st.sampled_from(["", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert quantity.parse(f"{number}{unit}") % max(number, 1) == 0


@pytest.mark.parametrize(("size", "expected"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (512 * 2**20, "512 MiB"),
    (int(19.2 * 2**30), "19.2 GiB"),
    (2**40, "1024.0 GiB"), (-2048, "-2.0 KiB"),
])  # fmt: skip
def test_sizes_as_tables_show_them(size: int, expected: str) -> None:
    assert quantity.show(size) == expected
