"""The literal files, requests and answers in the documents of the five systems, cut out by their lines."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

FOLDER: Final = Path(__file__).parent / "documents"


@dataclass(frozen=True, slots=True)
class Literal:
    """The lines `first` to `last` of a document, from `begin` in the first to `end` in the last where prose is around."""

    document: str
    first: int
    last: int
    begin: str = ""
    end: str = ""

    @property
    def text(self) -> str:
        """Return the text without its indentation."""
        lines = lines_of(self.document)[self.first - 1 : self.last]
        if self.begin:
            lines[0] = lines[0][lines[0].index(self.begin) :]
        if self.end:
            lines[-1] = lines[-1][: lines[-1].index(self.end) + len(self.end)]
        return textwrap.dedent("\n".join(lines) + "\n")


def lines_of(document: str) -> list[str]:
    """Return the lines of a document."""
    return (FOLDER / f"{document}.txt").read_text().split("\n")


# mlx-stack's issue 31.
MESH_ADVERTISEMENT = Literal("mesh", 82, 85)
MESH_DISCOVERY = Literal("mesh", 93, 100)
MESH_REQUEST = Literal("mesh", 139, 140)
MESH_STATUS = Literal("mesh", 149, 163)
MESH_VERBS = Literal("mesh", 200, 219)
MESH_CONFIGURATION = Literal("mesh", 223, 242)
# mlx_distributed_ring_inference_v2's README.
RING_ENDPOINTS = Literal("ring", 22, 37)
RING_VARIABLES = Literal("ring", 40, 99)
RING_VERBS = Literal("ring", 141, 145)
RING_REQUEST = Literal("ring", 147, 158, end='print(data["performance"])')
RING_RDMA_HOSTS = Literal("ring", 172, 175, end="]")
RING_THREE_HOSTS = Literal("ring", 197, 201, end="]")
# mlx-jaccl-cluster's README.
JACCL_HOSTS = Literal("jaccl", 61, 72, end="]")
JACCL_REQUEST = Literal("jaccl", 85, 87)
JACCL_VERBS = Literal("jaccl", 90, 175)
JACCL_ENDPOINTS = Literal("jaccl", 178, 197)
JACCL_VARIABLES = Literal("jaccl", 198, 225)
JACCL_NODE_VARIABLES = Literal("jaccl", 236, 241)
# LocalAI's page on MLX distributed inference.
LOCALAI_QUICK_START = Literal("localai", 44, 47)
LOCALAI_RING = Literal("localai", 55, 61)
LOCALAI_RING_HOSTS = Literal("localai", 67, 67)
LOCALAI_JACCL = Literal("localai", 75, 81)
LOCALAI_DEVICES = Literal("localai", 85, 88)
LOCALAI_THREE_HOSTS = Literal("localai", 118, 118, begin="[", end="]")
LOCALAI_COMMANDS = Literal("localai", 23, 36)
LOCALAI_WORKERS = Literal("localai", 116, 149)
# mlx-serving's PRD.
SERVING_STATIC = Literal("serving", 192, 245)
SERVING_CONFIGURATION = Literal("serving", 614, 738)
SERVING_DASHBOARD_API = Literal("serving", 851, 914)
SERVING_TOPICS = Literal("serving", 924, 942)
SERVING_REGISTRATION = Literal("serving", 949, 973)
SERVING_HEARTBEAT = Literal("serving", 978, 991)
SERVING_INFERENCE = Literal("serving", 996, 1003)
SERVING_STREAM = Literal("serving", 1008, 1030)
SERVING_CHAT = Literal("serving", 1113, 1131)
SERVING_CLUSTER_API = Literal("serving", 1136, 1174)
SERVING_HEALTH = Literal("serving", 1181, 1187)
SERVING_METRICS = Literal("serving", 1192, 1200)
SERVING_SCENARIO_1 = Literal("serving", 1506, 1515)
SERVING_SCENARIO_2 = Literal("serving", 1520, 1534)
SERVING_SCENARIO_3 = Literal("serving", 1539, 1549)

ALL: Final = {name: one for name, one in globals().items() if isinstance(one, Literal)}


def variables(table: Literal) -> dict[str, str]:
    """Return names and defaults of a table whose cells are lines of their own."""
    found = re.findall(r"^([A-Z_]+) \|\n([^|\n]+)\|", table.text, re.MULTILINE)
    return {name: default.strip() for name, default in found}


def parse_script(text: str) -> Any:
    """Parse an object of a script: names without quotes, comments, and `...` for more of the same."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text)
    return YAML(typ="safe").load(re.sub(r"^\s*\.\.\.\s*$", "", text, flags=re.MULTILINE))
