"""Load commands of Mach-O files: those of the real libmlx in MLX's wheels, and broken ones."""

import io
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery.mach_o import MachO, read_mach_o

# The headers and load commands of mlx/lib/libmlx.dylib in the wheels of mlx-metal 0.32.4 (PyPI).
HEADS = Path(__file__).parent / "mach_o"
NEW = (HEADS / "libmlx-0.32.4-macosx_26_0.head").read_bytes()


def read(data: bytes) -> MachO:
    return read_mach_o(io.BytesIO(data))


def test_the_build_for_macos_26_links_jaccl_and_is_for_26_2() -> None:
    newest, older = read(NEW), read((HEADS / "libmlx-0.32.4-macosx_15_0.head").read_bytes())
    assert (newest.is_arm64, newest.minimum_system) == (True, (26, 2))
    assert "@rpath/libjaccl.dylib" in newest.libraries
    assert (older.is_arm64, older.minimum_system) == (True, (15, 0))
    assert "/System/Library/Frameworks/Metal.framework/Versions/A/Metal" in older.libraries
    assert not [name for name in older.libraries if "jaccl" in name]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (b"\x7fELF" + bytes(60), "not a 64-bit Mach-O file"),
        (b"\xca\xfe\xba\xbe" + bytes(60), "of one architecture"),
        (NEW[:100], "longer than all of them"),
        (NEW[:20] + b"\xff" * 12 + NEW[32:], "bytes of load commands"),
    ],
)
def test_what_is_no_library_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(data)


@given(at=st.integers(0, len(NEW) - 4), junk=st.binary(min_size=1, max_size=4), end=st.integers(0))
def test_a_damaged_file_is_read_or_refused(at: int, junk: bytes, end: int) -> None:
    damaged = (NEW[:at] + junk + NEW[at + len(junk) :])[: end % (len(NEW) + 1)]
    with suppress(ValueError):
        read(damaged)
