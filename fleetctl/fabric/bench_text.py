"""What `fleetctl fabric bench` was asked for, and how its result is shown. Pure."""

from dataclasses import asdict, dataclass

from fleetctl import printers
from manifests.tree import Tree
from nodeagent.fabric import figures
from nodeagent.fabric.figures import Row, Verdict
from schemas.fabrictest import KIB, MIB, FabricRank
from schemas.shardgroup import Backend

_TITLES = ("SIZE", "ROUNDS", "WRONG", "FASTEST", "MEDIAN", "SLOWEST", "AVERAGE", "PEAK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is summed, and how often."""

    sizes: tuple[int, ...]
    """Bytes."""
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came out."""

    about: str
    """The group, or this machine."""
    backend: Backend
    ranks: tuple[FabricRank, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return figures.rows(self.ranks)

    @property
    def verdict(self) -> Verdict:
        return figures.judge(self.rows, self.backend)


def text(result: Result, *, is_verbose: bool) -> str:
    """Return the result for people."""
    macs = ", ".join(rank.node for rank in result.ranks)
    parts = [f"{result.about}: {result.backend} over {len(result.ranks)} ranks ({macs})"]
    if is_verbose:
        parts += [_of_rank(rank) for rank in result.ranks]
    parts.append(printers.lined_up([_cells(one) for one in result.rows], _TITLES))
    verdict = result.verdict
    parts.append(f"{'healthy' if verdict.is_healthy else 'NOT healthy'}: {verdict.message}")
    return "\n\n".join(parts)


def _of_rank(rank: FabricRank) -> str:
    lines = [f"rank {rank.rank}, {rank.node}"]
    for one in rank.figures:
        times = " ".join(duration(took) for took in one.times_us)
        wrong = f" ({one.wrong} wrong)" if one.wrong else ""
        lines.append(f"  {size(one.size)}{wrong}: {times}")
    return "\n".join(lines)


def _cells(one: Row) -> list[str]:
    times = (duration(took) for took in (one.least_us, one.median_us, one.most_us))
    speeds = (speed(one.average_gb_s), speed(one.peak_gb_s))
    return [size(one.size), str(one.rounds), str(one.wrong), *times, *speeds]


def size(count: int) -> str:
    """Return bytes as people name them: 65536 is "64 KB"."""
    for unit, word in ((MIB, "MB"), (KIB, "KB")):
        if count % unit == 0:
            return f"{count // unit} {word}"
    return f"{count} B"


def speed(gb_s: float) -> str:
    """Return 10^9 bytes a second in the unit that suits them."""
    return f"{gb_s:.2f} GB/s" if gb_s >= 0.1 else f"{gb_s * 1e3:.2f} MB/s"


def duration(took_us: float) -> str:
    """Return microseconds in the unit that suits them."""
    if took_us < 1e3:
        return f"{took_us:.1f} us"
    return f"{took_us / 1e3:.2f} ms" if took_us < 1e6 else f"{took_us / 1e6:.2f} s"


def tree(result: Result) -> dict[str, Tree]:
    """Return the result for programs: sizes in bytes, times in microseconds, speeds in 10^9 bytes a second."""
    verdict = result.verdict
    return {
        "about": result.about,
        "backend": result.backend,
        "isHealthy": verdict.is_healthy,
        "reason": verdict.reason,
        "message": verdict.message,
        "sizes": [_tree_of(one) for one in result.rows],
        "ranks": [rank.model_dump(mode="json", by_alias=True) for rank in result.ranks],
    }


def _tree_of(one: Row) -> Tree:
    names = {
        "least_us": "leastUs",
        "median_us": "medianUs",
        "most_us": "mostUs",
        "average_gb_s": "averageGbS",
        "peak_gb_s": "peakGbS",
    }
    return {names.get(name, name): value for name, value in asdict(one).items()}
