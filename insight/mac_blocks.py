"""Blocks of text with bars: one per Mac, with the memory of each replica, what pools reserve, and what is free. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

from insight.memory_proof import size_text

Mark: TypeAlias = Literal["", "+", "-"]
"""+ has come, - has gone."""

_BAR_WIDTH = 40
_USED, _RESERVED, _FREE, _GONE = "█", "▒", "·", "░"


@dataclass(frozen=True, slots=True, kw_only=True)
class MacEntry:
    """The memory of one replica on a Mac."""

    label: str
    size_bytes: int
    mark: Mark = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacBlock:
    """A Mac and its memory for models."""

    name: str
    chip: str
    offered_bytes: int
    """Memory for models, including what pools reserve."""
    reserved_bytes: int = 0
    entries: tuple[MacEntry, ...] = ()
    is_ready: bool = True

    @property
    def used_bytes(self) -> int:
        """Return the memory of the replicas that are there."""
        return sum(entry.size_bytes for entry in self.entries if entry.mark != "-")

    @property
    def free_bytes(self) -> int:
        return max(0, self.offered_bytes - self.reserved_bytes - self.used_bytes)

    @property
    def has_changed(self) -> bool:
        """Return whether a replica has come or gone."""
        return any(entry.mark for entry in self.entries)


@dataclass(frozen=True, slots=True)
class _Line:
    mark: str
    label: str
    size_bytes: int
    fill: str
    note: str = ""


def blocks_text(blocks: Sequence[MacBlock]) -> str:
    """Return the blocks, separated by blank lines; their columns are aligned."""
    lines = [_lines(block) for block in blocks]
    labels = [line.label for line in chain(*lines)]
    width = max(map(len, labels), default=0)
    return "\n\n".join(
        "\n".join((_title(block), *(_line_text(line, width, block) for line in some)))
        for block, some in zip(blocks, lines, strict=True)
    )


def _title(block: MacBlock) -> str:
    if not block.is_ready:
        return f"{block.name}  {block.chip}, not reachable"
    return f"{block.name}  {block.chip}, {size_text(block.offered_bytes)} for models"


def _lines(block: MacBlock) -> list[_Line]:
    lines = [
        _Line(
            entry.mark,
            entry.label,
            entry.size_bytes,
            _GONE if entry.mark == "-" else _USED,
            entry.note,
        )
        for entry in block.entries
    ]
    if not block.is_ready:
        return lines
    if block.reserved_bytes:
        lines.append(_Line("", "reserved", block.reserved_bytes, _RESERVED, "by pools"))
    return [*lines, _Line("", "free", block.free_bytes, _FREE)]


def _line_text(line: _Line, width: int, block: MacBlock) -> str:
    share = line.size_bytes / block.offered_bytes if block.offered_bytes else 0.0
    cells = min(_BAR_WIDTH, round(share * _BAR_WIDTH)) or (1 if line.size_bytes else 0)
    head = f"{line.mark:>1} {line.label:<{width}}  {size_text(line.size_bytes):>10}  {share:>4.0%}"
    tail = f"  ({line.note})" if line.note else ""
    return f"{head}  {line.fill * cells}{tail}".rstrip()
