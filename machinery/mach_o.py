"""Reads the load commands of Mach-O files: the oldest macOS that a library is built for, and the libraries it links."""

import struct
from dataclasses import dataclass
from typing import BinaryIO, Final

# mach-o/loader.h and mach/machine.h of Apple's XNU.
_MAGIC_64: Final = 0xFEEDFACF
_CPU_ARM64: Final = 0x0100000C
_LC_BUILD_VERSION: Final = 0x32
_LINKS: Final = {
    0xC,  # LC_LOAD_DYLIB
    0x80000018,  # LC_LOAD_WEAK_DYLIB
    0x8000001F,  # LC_REEXPORT_DYLIB
}
_HEADER: Final = struct.Struct("<8I")
_COMMAND: Final = struct.Struct("<2I")
# libmlx has 30 commands in 4 KB; a large application has 100 KB.
_MAX_COMMANDS_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MachO:
    """The facts in the load commands of a 64-bit file."""

    is_arm64: bool
    minimum_system: tuple[int, int]
    """The oldest version of the system that it is built for, such as (26, 2); (0, 0) if it names none."""
    libraries: tuple[str, ...]
    """Install names of the libraries that it links, such as "@rpath/libjaccl.dylib"."""


def read_mach_o(file: BinaryIO) -> MachO:
    """Return what the load commands of the file say.

    Raises:
        ValueError: it is not a 64-bit Mach-O file of one architecture, or its load commands are broken.

    """
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{len(header)} bytes are too few for a Mach-O file")
    magic, cpu, _, _, count, size, _, _ = _HEADER.unpack(header)
    if magic != _MAGIC_64:
        raise ValueError("not a 64-bit Mach-O file of one architecture")
    if size > _MAX_COMMANDS_BYTES:
        raise ValueError(f"{size} bytes of load commands; at most {_MAX_COMMANDS_BYTES} are read")
    commands = file.read(size)
    minimum, libraries, at = (0, 0), [], 0
    for _ in range(count):
        if at + _COMMAND.size > len(commands):
            raise ValueError("the load commands are cut off")
        kind, length = _COMMAND.unpack_from(commands, at)
        body = commands[at : at + length]
        # Both kinds of interest have a word at 8 and one at 12: platform and minos, name's offset and timestamp.
        if length < _COMMAND.size or len(body) < length:
            raise ValueError("a load command is longer than all of them")
        if kind in _LINKS or kind == _LC_BUILD_VERSION:
            if length < 16:
                raise ValueError("a load command is too short for its kind")
            first, second = _COMMAND.unpack_from(body, _COMMAND.size)
            if kind == _LC_BUILD_VERSION:
                minimum = (second >> 16, second >> 8 & 0xFF)
            else:
                libraries.append(body[first:].partition(b"\0")[0].decode(errors="replace"))
        at += length
    return MachO(is_arm64=cpu == _CPU_ARM64, minimum_system=minimum, libraries=tuple(libraries))
