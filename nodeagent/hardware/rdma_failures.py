"""Failures of RDMA that MLX reports in words which do not tell their cause: the causes, and which a restart mends."""

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from schemas import local_network

RESTART: Final = "`fleetctl node reboot NODE --drain`"
# A device of Apple's driver has ten queue pairs; each connection of a rank takes one (mlx#4209, #3162).
QUEUE_PAIRS: Final = 10
RestartRule: TypeAlias = Literal["Always", "IfLinked", "Never"]
"""Need of a restart. IfLinked: only where cables and addresses are right, as in the loops of exo#1847."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """A failure of RDMA that MLX reports in words which do not tell its cause."""

    name: str
    pattern: re.Pattern[str]
    cause: str
    restart: RestartRule
    advice: str
    """The remedy; NODE is the name of the Mac."""


def _words(text: str) -> re.Pattern[str]:
    return re.compile(text, re.ASCII | re.IGNORECASE)


KNOWN_FAILURES: Final = (
    KnownFailure(
        name="errno 22",
        restart="IfLinked",
        pattern=_words(r"\berrno:? 22\b|queue pair to RTR.*invalid argument"),
        cause="the port of a cable has no IPv4 address when the ranks connect (mlx#3467)",
        advice="`fleetctl fabric check` names the port; `sudo fleetctl fabric setup` gives each cable a small network of its own",
    ),
    KnownFailure(
        name="queue pair",
        restart="IfLinked",
        pattern=_words(r"queue pair to RT[RS] failed with errno (?:2|60|96)\b"),
        cause="the driver does not connect a queue pair although the cable is in (exo#1847, exo#1973)",
        advice=f"pull and replug the cable of NODE; if that does not help, {RESTART}",
    ),
    KnownFailure(
        name="errno 60 or 65",
        restart="Never",
        pattern=_words(r"\berrno:? (?:60|65)\b|no route to host|operation timed out"),
        cause="a rank cannot reach another one over the address of its cable, though both Macs have it (mlx#3755)",
        advice="on NODE: `ping -c 3 -S ITS-ADDRESS OTHER-ADDRESS` for each cable, and compare masks. If only ping works, it is "
        f"macOS's {local_network.NAME}: {local_network.REMEDY}",
    ),
    KnownFailure(
        name="errno 16",
        restart="Always",
        pattern=_words(r"\berrno:? 16\b|resource busy"),
        cause=f"an RDMA device has no queue pair left of its {QUEUE_PAIRS}: killed ranks keep theirs (mlx#4209)",
        advice=f"{RESTART}: another attempt cannot help",
    ),
    KnownFailure(
        name="protection domain",
        restart="Always",
        pattern=_words(r"protection domain|ibv_alloc_pd"),
        cause="an RDMA device cannot be used any more, or has another name since the Mac was restarted (mlx#3207)",
        advice=f"`fleetctl fabric check` compares names; if they are right, {RESTART}",
    ),
)


def find_failure(words: str) -> KnownFailure | None:
    """Return the failure that the last words of a rank tell; None for any other."""
    return next((failure for failure in KNOWN_FAILURES if failure.pattern.search(words)), None)
