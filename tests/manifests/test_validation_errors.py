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
from tests.support.manifests_texts import HEAD, complaints, deployment, read

MD = f"{HEAD}kind: ModelDeployment\nmetadata:\n  name: qwen\n"
QWEN = "ModelDeployment/qwen"
PLACEMENT = (
    "pools, nodeSelector, tolerations, chips, minGpuCores, tier, antiAffinity, maxReplicasPerNode, "
    "spreadBy, profile, weights"
)


def spec(lines: str) -> str:
    """Return a deployment whose spec begins in line 5, with these lines from line 7."""
    return f"{MD}spec:\n  model: {{path: m}}\n{lines}"


WRONG_TYPES = [
    pytest.param(
        spec("  replicas: two\n"),
        f':7:13: {QWEN}: spec.replicas: expected an integer, got "two" (a string). '
        "Write: replicas: 2",
        id="word-for-integer",
    ),
    pytest.param(
        spec('  replicas: "3"\n'),
        f':7:13: {QWEN}: spec.replicas: expected an integer, got "3" (a string). '
        "Write: replicas: 3",
        id="quoted-integer",
    ),
    pytest.param(
        spec("  contextLength: lots\n"),
        f':7:18: {QWEN}: spec.contextLength: expected an integer, got "lots" (a string)',
        id="nonsense-for-integer",
    ),
    pytest.param(
        spec("  replicas: 2.0\n"),
        f":7:13: {QWEN}: spec.replicas: expected an integer, got 2.0 (a number). Write: replicas: 2",
        id="float-for-integer",
    ),
    pytest.param(
        spec("  replicas: true\n"),
        f":7:13: {QWEN}: spec.replicas: expected an integer, got true (a boolean)",
        id="boolean-for-integer",
    ),
    pytest.param(
        spec("  replicas:\n"),
        f":7:3: {QWEN}: spec.replicas: expected an integer, got nothing. Write a value, or remove the line",
        id="nothing-for-integer",
    ),
    pytest.param(
        spec("  replicas: -1\n"),
        f":7:13: {QWEN}: spec.replicas: must be 0 or more, got -1 (an integer)",
        id="below",
    ),
    pytest.param(
        spec("  replicas: 10001\n"),
        f":7:13: {QWEN}: spec.replicas: must be 10000 or less, got 10001 (an integer)",
        id="above",
    ),
    pytest.param(
        spec("  servedNames: fast\n"),
        f':7:16: {QWEN}: spec.servedNames: expected a list, got "fast" (a string). '
        "Write: servedNames: [fast]",
        id="string-for-list",
    ),
    pytest.param(
        spec("  servedNames:\n    a: b\n"),
        f":7:3: {QWEN}: spec.servedNames: expected a list, got a mapping. "
        "Write one item per line, each after a '-'",
        id="mapping-for-list",
    ),
    pytest.param(
        spec("  placement: [studio]\n"),
        f":7:3: {QWEN}: spec.placement: expected a mapping, got a list. "
        f"Its fields are: {PLACEMENT}",
        id="list-for-mapping",
    ),
    pytest.param(
        spec("  placement:\n    pools: [studio, 7]\n"),
        f":8:21: {QWEN}: spec.placement.pools[1]: expected a string, got 7 (an integer). "
        'Write: - "7"',
        id="integer-in-list",
    ),
    pytest.param(
        spec("  placement:\n    nodeSelector:\n      rack: 12\n"),
        f":9:13: {QWEN}: spec.placement.nodeSelector.rack: expected a string, got 12 (an integer). "
        'Write: rack: "12"',
        id="integer-for-label",
    ),
    pytest.param(
        spec("  placement:\n    nodeSelector:\n      fleet/v: 1.10\n"),
        f':9:16: {QWEN}: spec.placement.nodeSelector["fleet/v"]: expected a string, '
        'got 1.10 (a number). Write: fleet/v: "1.10"',
        id="label-keeps-its-spelling",
    ),
    pytest.param(
        spec("  model: {path: m}\n").replace("{path: m}\n  model: ", ""),
        "",
        id="sound",
    ),
    pytest.param(
        f"{MD}spec:\n  model: {{path: ../m}}\n",
        f":6:17: {QWEN}: spec.model.path: must not contain '..'; write an absolute path, or one below the models folder",
        id="path-that-climbs",
    ),
    pytest.param(
        f"{MD}spec:\n  model: {{path: ''}}\n",
        f":6:17: {QWEN}: spec.model.path: must not be empty",
        id="empty-path",
    ),
    pytest.param(
        f"{MD}spec:\n  replicas: 1\n",
        f":5:1: {QWEN}: spec.model: is required but not given. "
        "Meaning: The weights, and optionally an adapter and a draft model",
        id="missing",
    ),
    pytest.param(
        spec("  routing: {timeouts: {request: 5}}\n"),
        f":7:33: {QWEN}: spec.routing.timeouts.request: expected a duration, got 5 (an integer). "
        "Write: request: 5s",
        id="integer-for-duration",
    ),
    pytest.param(
        spec("  routing: {hedging: {after: 0.05}}\n"),
        f":7:30: {QWEN}: spec.routing.hedging.after: expected a duration, got 0.05 (a number). "
        "Write: after: 50ms",
        id="number-for-duration",
    ),
    pytest.param(
        spec("  rollout: {canary: {steps: [{weight: 5}], analysis: {maxTtftP95: 0.5s}}}\n"),
        f":7:67: {QWEN}: spec.rollout.canary.analysis.maxTtftP95: '0.5s' is not a duration; write hours, minutes, "
        "seconds and milliseconds as in 1h30m, 90s or 500ms. Write: maxTtftP95: 500ms",
        id="fraction-of-a-second",
    ),
    pytest.param(
        spec("  routing: {queueing: {}}\n"),
        f":7:13: {QWEN}: spec.routing.queueing: limits nothing; set concurrency or coldStart, or leave queueing out",
        id="queueing-of-nothing",
    ),
    pytest.param(
        spec("  routing: {queueing: {coldStart: 1m, depth: 5}}\n"),
        f":7:13: {QWEN}: spec.routing.queueing: depth and timeout have no effect without concurrency; set it as well",
        id="queueing-without-concurrency",
    ),
    pytest.param(
        spec("  routing: {timeouts: {attempt: 5s, request: 2s}}\n"),
        f":7:13: {QWEN}: spec.routing.timeouts: attempt is 5s and request is 2s, so the request would end before another endpoint is tried; make attempt shorter than request, or leave it out",
        id="attempt-beyond-request",
    ),
    pytest.param(
        f"{HEAD}kind: ModelRoute\nmetadata: {{name: r}}\n"
        "spec: {model: r, backends: [{deployment: a, weight: -1}]}\n",
        ":4:53: ModelRoute/r: spec.backends[0].weight: must be 0 or more, got -1 (an integer)",
        id="a-wrong-item-is-an-item",
    ),
    pytest.param(
        f"{HEAD}kind: ModelRoute\nmetadata: {{name: r}}\nspec: {{model: r, backends: []}}\n",
        ":4:18: ModelRoute/r: spec.backends: needs 1 item or more, has 0",
        id="no-item",
    ),
    pytest.param(
        f"{HEAD}kind: Node\nmetadata: {{name: mac-1}}\nspec: {{unschedulable: yes}}\n",
        ':4:23: Node/mac-1: spec.unschedulable: expected true or false, got "yes" (a string). '
        "Write: unschedulable: true",
        id="yes-is-a-text",
    ),
]


MEANT = [
    ("  contextLength: 32k\n", "Write: contextLength: 32768"),
    ("  contextLength: 1M\n", "Write: contextLength: 1048576"),
    ("  contextLength: 1.5K\n", "Write: contextLength: 1536"),
    ("  contextLength: 32_768\n", "Write: contextLength: 32768"),
    ("  resources: {memory: 24GB}\n", "Write: memory: 24G or 24Gi"),
    ("  resources: {memory: 24 gib}\n", "Write: memory: 24Gi"),
    ("  resources: {memory: 512mb}\n", "Write: memory: 512M or 512Mi"),
    ("  rollout: {progressDeadline: 10min}\n", "Write: progressDeadline: 10m"),
    ("  rollout: {progressDeadline: 1 hour 5 mins}\n", "Write: progressDeadline: 1h5m"),
    ("  rollout: {progressDeadline: 2d}\n", "Write: progressDeadline: 48h"),
    ("  routing: {hedging: {after: 50 msec}}\n", "Write: after: 50ms"),
    # Values that may have several forms: one problem, about the nearest form.
    ("  sharding: Two\n", "Write: sharding: two"),
    ("  placement: {tier: off}\n", "Write: tier: Off"),
    ("  placement: {tier: {minMemory: 64 GB}}\n", "Write: minMemory: 64G or 64Gi"),
]


@pytest.mark.parametrize(("text", "hint"), MEANT)
def test_advice_translates_what_was_meant(text: str, hint: str) -> None:
    [told] = complaints(spec(text))
    assert told.endswith(f". {hint}")


@pytest.mark.parametrize(
    "text",
    [
        "  contextLength: 1.3x\n",
        "  contextLength: 0.0001k\n",
        "  resources: {memory: much}\n",
        "  rollout: {progressDeadline: soon}\n",
        "  rollout: {progressDeadline: 10min!}\n",
        "  rollout: {progressDeadline: 50us}\n",
    ],
)
def test_advice_makes_nothing_up(text: str) -> None:
    [told] = complaints(spec(text))
    assert "Write:" not in told


@pytest.mark.parametrize("word", ["repo", "revision", "source"])
def test_a_model_of_a_hub_is_explained(word: str) -> None:
    told = complaints(f"{MD}spec:\n  model: {{{word}: mlx-community/Qwen3-4B-4bit}}\n")
    assert told[-1].endswith(
        f"spec.model.{word}: unknown field. A model of a hub is written as hub: {{repo: ORGANISATION/NAME}}, with "
        "revision below hub too (docs/models.md)"
    )


def test_a_wrong_repository_of_a_hub_is_one_problem_with_an_example() -> None:
    told = complaints(f"{MD}spec:\n  model: {{hub: {{repo: Qwen3-4B-4bit}}}}\n")
    assert told == [
        f":6:23: {QWEN}: spec.model.hub.repo: expected ORGANISATION/NAME, such as mlx-community/Qwen3-4B-4bit; "
        'got "Qwen3-4B-4bit" (a string)'
    ]


def test_the_address_of_a_page_of_a_hub_is_translated() -> None:
    page = "https://huggingface.co/mlx-community/Qwen3-4B-4bit/tree/main"
    [told] = complaints(f"{MD}spec:\n  model: {{hub: {{repo: '{page}'}}}}\n")
    assert told.endswith("Write: repo: mlx-community/Qwen3-4B-4bit")


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


NAMES = [
    pytest.param(
        f"{HEAD}kind: ModelDeployment\nmetadata: {{name: My_Model}}\nspec: {{model: {{path: m}}}}\n",
        ":3:18: ModelDeployment/My_Model: metadata.name: expected lower-case letters, digits, "
        '"-" and ".", beginning and ending with a letter or digit; got "My_Model" (a string). '
        "Write: name: my-model",
        id="name",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: {'a' * 129}}}\nspec: {{nodes: [a]}}\n",
        f":3:18: NodePool/{'a' * 129}: metadata.name: has 129 characters; at most 128 are allowed",
        id="long-name",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: a, labels: {{a b: c}}}}\nspec: {{nodes: [a]}}\n",
        ':3:30: NodePool/a: metadata.labels["a b"]: a label\'s key has letters, digits, "-", "_" '
        'and ".", beginning with a letter or digit, and before it optionally a prefix in lower case and "/"; got "a b" (a string)',
        id="label-key",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: a, labels: {{a: b c}}}}\nspec: {{nodes: [a]}}\n",
        ':3:33: NodePool/a: metadata.labels.a: expected letters, digits, "-", "_" and ".", '
        'beginning and ending with a letter or digit; got "b c" (a string)',
        id="label-value",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: a}}\nspec: {{selector: {{minMemory: 64 GB}}}}\n",
        ":4:30: NodePool/a: spec.selector.minMemory: expected a quantity of bytes such as 512Mi, "
        '96Gi or 1.5G; got "64 GB" (a string). Write: minMemory: 64G or 64Gi',
        id="quantity",
    ),
    pytest.param(
        spec("  servedNames: [-x]\n"),
        f":7:17: {QWEN}: spec.servedNames[0]: expected letters, digits, "
        '".", "_", ":", "/" and "-"; got "-x" (a string)',
        id="served-name",
    ),
]

UNKNOWN = [
    pytest.param(
        deployment().replace("kind: ModelDeployment", "kind: ModelDeploymnt"),
        ':3:7: ModelDeploymnt/qwen: kind: unknown kind "ModelDeploymnt". '
        "Did you mean ModelDeployment?",
        id="kind",
    ),
    pytest.param(
        deployment().replace("kind: ModelDeployment", "kind: md"),
        ':3:7: md/qwen: kind: unknown kind "md". Did you mean ModelDeployment?',
        id="short-kind",
    ),
    pytest.param(
        deployment().replace("kind: ModelDeployment", "kind: Pod"),
        ':3:7: Pod/qwen: kind: unknown kind "Pod". '
        "Known are: ModelDeployment, NodePool, ShardGroup, ModelRoute, GitSource, Node",
        id="strange-kind",
    ),
    pytest.param(
        deployment().replace("kind: ModelDeployment", "kind: [a]"),
        ":3:1: kind: expected a string, got a list",
        id="kind-is-a-list",
    ),
    pytest.param(
        f"{HEAD}kind: Replica\nmetadata: {{name: qwen-0}}\n",
        ":2:7: Replica/qwen-0: kind: users cannot write a Replica: the reconciler writes it for a "
        "ModelDeployment",
        id="replica",
    ),
    pytest.param(
        f"{HEAD}metadata: {{name: a}}\n",
        ":1:1: kind: is required but not given. "
        "One of: ModelDeployment, NodePool, ShardGroup, ModelRoute, GitSource, Node",
        id="no-kind",
    ),
    pytest.param(
        deployment().replace("v1alpha1", "v1"),
        ':2:13: ModelDeployment/qwen: apiVersion: unknown version "fleet/v1" (a string); there is '
        "only fleet/v1alpha1. Write: apiVersion: fleet/v1alpha1",
        id="version",
    ),
    pytest.param(
        deployment().replace(HEAD, ""),
        ":2:1: ModelDeployment/qwen: apiVersion: is required but not given. "
        "Write: apiVersion: fleet/v1alpha1",
        id="no-version",
    ),
    pytest.param(
        spec("  replica: 2\n"),
        f":7:3: {QWEN}: spec.replica: unknown field. Did you mean replicas?",
        id="field",
    ),
    pytest.param(
        spec("  served_names: [a]\n"),
        f":7:3: {QWEN}: spec.served_names: unknown field. Did you mean servedNames?",
        id="snake-case",
    ),
    pytest.param(
        spec("  placement: {gpu: 1}\n"),
        f":7:15: {QWEN}: spec.placement.gpu: unknown field. Known fields: {PLACEMENT}",
        id="strange-field",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: a, uuid: b}}\nspec: {{nodes: [a]}}\n",
        ":3:21: NodePool/a: metadata.uuid: unknown field. Known fields: name, labels, annotations",
        id="metadata-field",
    ),
    pytest.param(
        f"{HEAD}kind: NodePool\nmetadata: {{name: a, namespace: b}}\nspec: {{nodes: [a]}}\n",
        ":3:21: NodePool/a: metadata.namespace: unknown field. Fleets have no namespaces. Remove it",
        id="namespace",
    ),
    pytest.param(
        f"{HEAD}kind: ShardGroup\nmetadata: {{name: a}}\nspec:\n"
        "  members: [{node: a}, {node: b}]\n  reservation: exclusive\n",
        ":6:16: ShardGroup/a: spec.reservation: expected Shared or Exclusive, "
        'got "exclusive" (a string). Write: reservation: Exclusive',
        id="enum",
    ),
    pytest.param(
        f"{HEAD}kind: ShardGroup\nmetadata: {{name: a}}\nspec: {{members: [{{node: a}}]}}\n",
        ":4:1: ShardGroup/a: spec: has 1 members, and a group of 2 needs as many; add members or make size smaller",
        id="too-few",
    ),
]


# Fields that are valid alone but not together, and numbers out of range.
CACHES = [
    pytest.param(
        spec("  kvCache: {bits: 6}\n"),
        f":7:19: {QWEN}: spec.kvCache.bits: expected 4 or 8, got 6 (an integer)",
        id="bits",
    ),
    pytest.param(
        spec("  kvCache: {bits: 8, window: 64}\n"),
        f":7:3: {QWEN}: spec.kvCache: has bits and window, and a sliding cache cannot be quantized; "
        "remove one of them",
        id="bits-and-window",
    ),
    pytest.param(
        spec("  kvCache: {window: 4096}\n"),
        f":5:1: {QWEN}: spec: kvCache.window is 4096, and no request is longer than contextLength, 4096; "
        "leave the window out, or make it smaller",
        id="window-without-effect",
    ),
    pytest.param(
        f"{MD}spec:\n  kvCache: {{window: 64}}\n  model: {{path: m, draft: {{path: small}}}}\n",
        f":5:1: {QWEN}: spec: has kvCache.window and model.draft, and rejected tokens cannot be removed from a sliding cache; remove one of them",
        id="window-and-draft",
    ),
    pytest.param(
        f"{MD}spec:\n  model: {{path: m, draft: {{path: m}}}}\n",
        f":6:3: {QWEN}: spec.model: draft.path is the model itself, which proposes tokens no faster; write a smaller model",
        id="its-own-draft",
    ),
    pytest.param(
        f"{MD}spec:\n  model: {{path: m, adapter: m/}}\n",
        f":6:3: {QWEN}: spec.model: adapter is the model's own folder; write the folder that holds adapter_config.json",
        id="its-own-adapter",
    ),
]


@pytest.mark.parametrize(("text", "message"), [*WRONG_TYPES, *NAMES, *UNKNOWN, *CACHES])
def test_one_problem_is_one_paragraph(text: str, message: str) -> None:
    assert complaints(text) == ([message] if message else [])


@pytest.mark.parametrize(
    ("text", "got"),
    [("- a", "a list"), ("words", '"words" (a string)'), ("12", "12 (an integer)")],
)
def test_a_document_must_be_an_object(text: str, got: str) -> None:
    hint = "Begin with: apiVersion, kind, metadata, spec"
    assert complaints(text) == [f":1:1: expected an object, got {got}. {hint}"]


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


def test_fields_of_the_fleet_are_refused_in_a_manifest() -> None:
    text = deployment(meta="  generation: 3\n  resourceVersion: '7'\n") + "status: {}\n"
    assert complaints(text) == [
        f":6:3: {QWEN}: metadata.generation: is set by the fleet. Remove it",
        f":7:3: {QWEN}: metadata.resourceVersion: is set by the fleet. Remove it",
        f":12:1: {QWEN}: status: is set by the fleet. Remove it",
    ]


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
    "kind", [kind for kind in KINDS if kind.written_by_users], ids=lambda kind: kind.name
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
