"""A finished report: anonymised, with its verdicts, as one archive."""

import gzip
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from fleetctl.cli.errors import FleetctlError
from fleetctl.mac_report import checks
from fleetctl.mac_report.anonymise import Anonymiser
from fleetctl.mac_report.parsers import PARSERS, parse
from fleetctl.mac_report.readings import Comparison, Readings, Verdict
from machinery import files
from machinery import macos_commands as mac
from machinery.version import version as fleet_version
from nodeagent.hardware.system_text import parse_pairs

FORMAT: Final = 1
FILE: Final = "report.json"
_FAILED: Final = (Verdict.DIFFERS, Verdict.MISSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report that holds no known personal detail."""

    tree: Mapping[str, Any]
    comparisons: Sequence[Comparison]
    replaced: Mapping[str, int]

    @property
    def holds(self) -> bool:
        """Return whether no comparison failed."""
        return not any(comparison.verdict in _FAILED for comparison in self.comparisons)

    def write(self, path: Path) -> None:
        """Write the archive; the same report gives the same bytes. Raises OSError."""
        text = "\n".join((*self.summary(), ""))
        with (
            files.open_replacement(path) as file,
            gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name, raw in (
                (FILE, orjson.dumps(self.tree, option=orjson.OPT_INDENT_2)),
                ("README.txt", text.encode()),
            ):
                info = tarfile.TarInfo(f"mac-report/{name}")
                info.size, info.mode = len(raw), 0o600
                archive.addfile(info, io.BytesIO(raw))

    def summary(self) -> list[str]:
        """Return the verdicts, and what was replaced."""
        width = max((len(comparison.name) for comparison in self.comparisons), default=0)
        lines = [f"{c.verdict:<9} {c.name:<{width}}  {c.detail}"[:240] for c in self.comparisons]
        shown = ", ".join(
            f"{count} of {kind}" for kind, count in sorted(self.replaced.items()) if count
        )
        failed = sum(comparison.verdict in _FAILED for comparison in self.comparisons)
        end = (
            f"{failed} of {len(lines)} comparisons do not hold"
            if failed
            else f"{len(lines)} comparisons: none fails"
        )
        return [*lines, f"replaced (different values): {shown or 'nothing'}", end]


def build_report(readings: Readings, anonymiser: Anonymiser) -> Report:
    """Return the report of the readings.

    Raises:
        FleetctlError: a personal detail is still in it.

    """
    hide = anonymiser.text
    runs = {
        context.value: {
            command.name: {
                "argv": [hide(word) for word in run.argv],
                "out": hide(run.out),
                "err": hide(run.err),
                "code": run.code,
                "seconds": run.seconds,
                "note": hide(run.note),
                # Of the text as it is in the report, so that a test can repeat it.
                "parsed": parse(command, hide(run.out)) if command in PARSERS else None,
            }
            for command, run in by_command.items()
        }
        for context, by_command in readings.runs.items()
    }
    comparisons = [
        Comparison(name=c.name, verdict=c.verdict, detail=hide(c.detail))
        for c in checks.compare(readings)
    ]
    sysctl, version = (
        parse_pairs(readings.out(mac.FACTS_SYSCTL)),
        parse_pairs(readings.out(mac.VERSION)),
    )
    measured = {
        "launchd": None if readings.launchd is None else asdict(readings.launchd),
        "network": [asdict(probe) for probe in readings.network],
        "engine": None if readings.engine is None else asdict(readings.engine),
        "metal": None if readings.metal is None else {
            "reason": readings.metal.reason, "message": readings.metal.message,
            "build": readings.metal.build and readings.metal.build.model_dump(mode="json", by_alias=True),
            "device": readings.metal.device and readings.metal.device.model_dump(mode="json", by_alias=True),
        },
        "sources": asdict(readings.sources) | {"addresses": sorted(readings.sources.addresses)},
        "notes": list(readings.notes),
    }  # fmt: skip
    tree = {
        "format": FORMAT, "model": hide(sysctl.get("hw.model", "")), "build": hide(version.get("BuildVersion", "")),
        "version": hide(version.get("ProductVersion", "")), "fleet": fleet_version(), "runs": runs,
        "measured": anonymiser.tree(measured), "comparisons": [asdict(comparison) for comparison in comparisons],
        "replaced": dict(anonymiser.counts()),
    }  # fmt: skip
    leaks = sorted({kind for text in _texts(tree) for kind in anonymiser.leaks(text)})
    if leaks:
        raise FleetctlError(
            f"the report still holds personal details ({', '.join(leaks)}), so nothing was written; this is a mistake of "
            "mac-report, please report it with the name of the kind only"
        )
    return Report(tree=tree, comparisons=comparisons, replaced={**anonymiser.counts()})


def _texts(tree: Any) -> list[str]:
    if isinstance(tree, Mapping):
        return [text for pair in tree.items() for part in pair for text in _texts(part)]
    if isinstance(tree, list | tuple):
        return [text for item in tree for text in _texts(item)]
    return [tree] if isinstance(tree, str) else []
