"""Tests of `manifests.validation_errors`: invalid objects, and the exact messages."""

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, StringConstraints

from manifests import load
from manifests.errors import ManifestError, ManifestErrors
from manifests.patterns import RULES
from manifests.trees import show_path
from manifests.yaml import nodes, parser
from schemas.kinds import KINDS, Kind
from schemas.meta import API_VERSION, FLEET_OWNED, ObjectMeta
from tests.support.golden_cases import Golden
from tests.support.manifests_texts import HEAD, complaints, deployment, read

MD = f"{HEAD}kind: ModelDeployment\nmetadata:\n  name: qwen\n"


def spec(lines: str) -> str:
    """Return a deployment whose spec begins in line 5, with these lines from line 7."""
    return f"{MD}spec:\n  model: {{path: m}}\n{lines}"


def of_model(text: str, lines: str = "") -> str:
    return f"{MD}spec:\n{lines}  model: {text}\n"


def of_kind(kind: str, spec: str, metadata: str = "name: a") -> str:
    return f"{HEAD}kind: {kind}\nmetadata: {{{metadata}}}\nspec: {spec}\n"


def replaced(old: str, new: str) -> str:
    return deployment().replace(old, new)


HUB_PAGE = "https://huggingface.co/mlx-community/Qwen3-4B-4bit/tree/main"
# Each case is one problem, apart from those of a hub; what users read is in tests/golden/manifests.
CASES = {
    "Wrong types": [
        spec("  replicas: two\n"),
        spec('  replicas: "3"\n'),
        spec("  contextLength: lots\n"),
        spec("  replicas: 2.0\n"),
        spec("  replicas: true\n"),
        spec("  replicas:\n"),
        spec("  replicas: -1\n"),
        spec("  replicas: 10001\n"),
        spec("  servedNames: fast\n"),
        spec("  servedNames:\n    a: b\n"),
        spec("  placement: [studio]\n"),
        spec("  placement:\n    pools: [studio, 7]\n"),
        spec("  placement:\n    nodeSelector:\n      rack: 12\n"),
        spec("  placement:\n    nodeSelector:\n      fleet/v: 1.10\n"),
        of_model("{path: ../m}"),
        of_model("{path: ''}"),
        f"{MD}spec:\n  replicas: 1\n",
        spec("  routing: {timeouts: {request: 5}}\n"),
        spec("  routing: {hedging: {after: 0.05}}\n"),
        spec("  rollout: {canary: {steps: [{weight: 5}], analysis: {maxTtftP95: 0.5s}}}\n"),
        of_kind("ModelRoute", "{model: r, backends: [{deployment: a, weight: -1}]}"),
        of_kind("ModelRoute", "{model: r, backends: []}"),
        of_kind("Node", "{unschedulable: yes}"),
        "- a",
        "words",
        "12",
    ],
    "Fields that are invalid together": [
        spec("  routing: {queueing: {}}\n"),
        spec("  routing: {queueing: {coldStart: 1m, depth: 5}}\n"),
        spec("  routing: {timeouts: {attempt: 5s, request: 2s}}\n"),
        of_kind("ShardGroup", "{members: [{node: a}]}"),
        spec("  kvCache: {bits: 6}\n"),
        spec("  kvCache: {bits: 8, window: 64}\n"),
        spec("  kvCache: {window: 4096}\n"),
        of_model("{path: m, draft: {path: m}}"),
        of_model("{path: m, adapter: m/}"),
    ],
    "Advice translates what was meant": [
        spec("  contextLength: 32k\n"),
        spec("  contextLength: 1M\n"),
        spec("  contextLength: 1.5K\n"),
        spec("  contextLength: 32_768\n"),
        spec("  resources: {memory: 24GB}\n"),
        spec("  resources: {memory: 24 gib}\n"),
        spec("  resources: {memory: 24}\n"),
        spec("  resources: {memory: 512mb}\n"),
        spec("  rollout: {progressDeadline: 10min}\n"),
        spec("  rollout: {progressDeadline: 1 hour 5 mins}\n"),
        spec("  rollout: {progressDeadline: 2d}\n"),
        spec("  routing: {hedging: {after: 50 msec}}\n"),
        # Values that may have several forms: one problem, about the nearest form.
        spec("  sharding: Two\n"),
        spec("  placement: {tier: off}\n"),
        spec("  placement: {tier: {minMemory: 64 GB}}\n"),
        of_kind("NodePool", "{selector: {minMemory: 64 GB}}"),
        of_model("{hub: {repo: Qwen3-4B-4bit}}"),
        of_model(f"{{hub: {{repo: '{HUB_PAGE}'}}}}"),
        *(of_model(f"{{{word}: mlx-community/Qwen3-4B}}") for word in ("repo", "revision", "source")),
    ],
    "Advice makes nothing up": [
        spec("  contextLength: 1.3x\n"),
        spec("  contextLength: 0.0001k\n"),
        spec("  resources: {memory: much}\n"),
        spec("  rollout: {progressDeadline: soon}\n"),
        spec("  rollout: {progressDeadline: 10min!}\n"),
        spec("  rollout: {progressDeadline: 50us}\n"),
    ],
    "Names": [
        of_kind("ModelDeployment", "{model: {path: m}}", "name: My_Model"),
        of_kind("NodePool", "{nodes: [a]}", f"name: {'a' * 129}"),
        of_kind("NodePool", "{nodes: [a]}", "name: a, labels: {a b: c}"),
        of_kind("NodePool", "{nodes: [a]}", "name: a, labels: {a: b c}"),
        spec("  servedNames: [-x]\n"),
    ],
    "Unknown kinds, versions and fields": [
        replaced("kind: ModelDeployment", "kind: ModelDeploymnt"),
        replaced("kind: ModelDeployment", "kind: md"),
        replaced("kind: ModelDeployment", "kind: Pod"),
        replaced("kind: ModelDeployment", "kind: [a]"),
        f"{HEAD}kind: Replica\nmetadata: {{name: qwen-0}}\n",
        f"{HEAD}metadata: {{name: a}}\n",
        replaced("v1alpha1", "v1"),
        replaced(HEAD, ""),
        spec("  replica: 2\n"),
        spec("  served_names: [a]\n"),
        spec("  placement: {gpu: 1}\n"),
        of_kind("NodePool", "{nodes: [a]}", "name: a, uuid: b"),
        of_kind("NodePool", "{nodes: [a]}", "name: a, namespace: b"),
        of_kind("ShardGroup", "\n  members: [{node: a}, {node: b}]\n  reservation: exclusive"),
        deployment(meta="  generation: 3\n  resourceVersion: '7'\n") + "status: {}\n",
    ],
}  # fmt: skip


def test_messages_about_invalid_objects(golden: Golden) -> None:
    """Each problem is one paragraph with its place; `Write:` offers what is valid."""
    sections = {
        title: [(text, complaints(text)) for text in texts] for title, texts in CASES.items()
    }
    golden.check("manifests/validation_errors.txt", sections)


def patterns(found: Any, where: str, seen: set[type]) -> Iterator[tuple[str, str]]:
    """Yield the patterns of a type and of the fields in it, each with its place."""
    for mark in getattr(found, "__metadata__", ()):
        if isinstance(mark, StringConstraints) and mark.pattern:
            yield str(mark.pattern), where
    if isinstance(found, type) and issubclass(found, BaseModel):
        if found not in seen:
            seen.add(found)
            for name, field in found.model_fields.items():
                if name != "status":
                    marked = [Annotated[str, mark] for mark in field.metadata]
                    for one in (field.annotation, *marked):
                        yield from patterns(one, f"{where}.{name}", seen)
        return
    for part in get_args(found):
        yield from patterns(part, where, seen)


def test_no_user_reads_a_regular_expression() -> None:
    """Each pattern of a field that users write has a rule in words."""
    written = [kind for kind in KINDS if kind.written_by_users]
    found = [one for kind in written for one in patterns(kind.type, kind.name, set())]
    assert len(found) > 30
    assert [where for pattern, where in found if pattern not in RULES] == []


def test_a_duplicate_is_reported_with_both_places(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(deployment("qwen"))
    b.write_text(deployment("other") + deployment("qwen"))
    with pytest.raises(ManifestErrors) as caught:
        load.load_objects([str(a), str(b)])
    assert str(caught.value) == (
        f"{b}:14:3: ModelDeployment/qwen: metadata.name: is declared twice, first at {a}:2. "
        "Remove one of them, or give it another name"
    )


def test_fields_of_the_fleet_are_dropped_from_output_of_get() -> None:
    meta = "  uid: u-1\n  generation: 3\n  creationTimestamp: nonsense\n  finalizers: [a]\n"
    [loaded] = read(deployment(meta=meta) + "status: {replicas: 2}\n")
    [fresh] = read(deployment())
    assert loaded.obj == fresh.obj


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(spec("  replicas: two\n  concurrency: 0\n"))
    (tmp_path / "b.yaml").write_text("a: [")
    (tmp_path / "c.yaml").write_text(deployment("c").replace("path:", "pth:"))
    with pytest.raises(ManifestErrors) as caught:
        load.load_objects([str(tmp_path), str(tmp_path / "nope.yaml")])
    places = [Path(problem.source).name for problem in caught.value.problems]
    assert places == ["a.yaml", "a.yaml", "b.yaml", "c.yaml", "nope.yaml"]


def test_a_long_list_of_problems_is_truncated() -> None:
    fields = "".join(f"  zz{n:02}: 1\n" for n in range(25))
    with pytest.raises(ManifestErrors) as caught:
        read(spec(fields))
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[-1]) == (21, "... and 5 more problems")
    assert len(caught.value.problems) == 25


WRONG_VALUES: list[Any] = [
    None, "", "two", "yes", "off", 7, -1, 1.5, 2.0, True, [], [1], ["a", "a"], {}, {"a": "b"}, {"a b": None},
    "32k", "24GB", "24 gib", "10min", "0s", "2 days", 90, 0.05, "My_Name", "-x", "a" * 200, "20000000000", "8", 10**30,
    "https://huggingface.co/a/b--c/tree/main", "a, b", "a]b", "# a", "*", "\x00", "exclusive", "always", "m4-max",
]  # fmt: skip


def fields(found: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all fields in a type; lists and mappings have one item."""
    if isinstance(found, type) and issubclass(found, BaseModel):
        for field in found.model_fields.values():
            name = field.alias or ""
            if (path or name in ("metadata", "spec")) and name not in FLEET_NAMES:
                yield (*path, name)
                yield from fields(field.annotation, (*path, name))
        return
    if get_origin(found) in (tuple, dict):
        item = 0 if get_origin(found) is tuple else "k"
        yield (*path, item)
        path, arguments = (*path, item), get_args(found)[-1 if item == "k" else 0 :][:1]
    else:
        arguments = get_args(found) if get_origin(found) is not Literal else ()
    for argument in arguments:
        yield from fields(argument, path)


def manifest(kind: Kind, path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return a manifest of a kind with one value."""
    for part in reversed(path):
        value = [value] if part == 0 else {part: value}
    return {"apiVersion": API_VERSION, "kind": kind.name, "metadata": {"name": "a"}, **value}


def problems_of(tree: dict[str, Any]) -> list[ManifestError]:
    try:
        load.load_objects(["-"], stdin=BytesIO(json.dumps(tree).encode()))
    except ManifestErrors as errors:
        return list(errors.problems)
    return []


def remedies(problem: ManifestError, path: tuple[str | int, ...]) -> Iterator[Any]:
    """Yield the values that the hint of a problem offers; REMOVED for one that removes the line."""
    hint = problem.hint
    if "emove" in hint:
        yield REMOVED
    if ": " in hint and hint.startswith("Write: "):
        name, _, values = hint.removeprefix("Write: ").partition(
            " " if hint.startswith("Write: - ") else ": "
        )
        assert name == (path[-1] if isinstance(path[-1], str) else "-")
        for value in values.split(" or "):
            [root] = parser.parse(f"v: {value}", "").documents
            node = nodes.find_node(root, ("v",))
            yield nodes.plain_value(node) if node is not None else None
    elif hint.startswith("Write"):
        assert hint in (
            "Write a value",
            "Write a value, or remove the line",
            "Write one item per line, each after a '-'",
        )


REMOVED = object()
FLEET_NAMES = {ObjectMeta.model_fields[name].alias or name for name in FLEET_OWNED}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.name, marks=[pytest.mark.ci] * (kind.name == "ModelDeployment"))
        for kind in KINDS
        if kind.written_by_users
    ],
)
def test_every_remedy_is_valid(kind: Kind) -> None:
    """Each value that a hint offers passes the next validation at its place, and so does a line that it removes."""
    tried = set()
    for path in dict.fromkeys(fields(kind.type, ())):
        place = show_path(path)
        for wrong in WRONG_VALUES:
            problems = [
                error for error in problems_of(manifest(kind, path, wrong)) if error.path == place
            ]
            # One, also of a value that may have several forms; a mapping's key may be wrong beside its value.
            assert len(problems) <= 1 + (path[-1] == "k")
            for problem in problems:
                assert not problem.message.startswith("input should")  # pydantic's words
                for value in remedies(problem, path):
                    fixed = manifest(kind, path, value)
                    if value is REMOVED:
                        fixed = manifest(kind, path[:-1], [] if path[-1] == 0 else {})
                    left = [
                        str(error) for error in problems_of(fixed) if error.path.startswith(place)
                    ]
                    assert not left, (problem.hint, left)
                    tried.add((place, problem.hint))
    assert len(tried) > 10
