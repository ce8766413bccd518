"""`fleetctl import`: refusals, secrets, weights, comments, and nodes by their addresses; `tests/seeds` has whole files."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from compat.importers import drafts
from compat.importers.source import Source, read_documents
from fleetctl.verbs.import_ import importing
from schemas.node import FabricInterface, NodeFabric
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import node_status, put_node
from tests.support.sampling import samples

EXAMPLES = Path(__file__).parents[2] / "examples" / "import"


def run(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(importing, list(words), input=stdin)


async def test_addresses_are_those_that_agents_report(tmp_path: Path) -> None:
    """No --nodes: the fleet knows the Macs of the ring's cable, of LocalAI's ports, and of static workers."""
    fleet = MemoryFleet()
    cable = (FabricInterface(name="bridge0", address="192.168.5.2"),)
    reported = {
        "studio": node_status("studio").model_copy(update={"address": "192.168.5.1"}),
        "mini": node_status("mini").model_copy(
            update={"address": "192.168.1.11", "fabric": NodeFabric(interfaces=cable)}
        ),
        # Two parts of one machine: their address names neither.
        "part-1": node_status("part-1"),
        "part-2": node_status("part-2"),
    }
    await fleet.store.commit([], [put_node(name, status) for name, status in reported.items()])

    async def nodes_of(kind: str, *words: str, text: str) -> list[str]:
        done = await fleet.ctl("import", kind, "-", *words, stdin=text.encode())
        assert done.code == 0, done.err
        return re.findall(r"- (?:node: )?(studio|mini|other)$", done.out, re.MULTILINE)

    ring = (EXAMPLES / "ring.env").read_text()
    assert await nodes_of("ring", text=ring) == ["studio", "mini"]
    named = ring.replace("mini2@192.168.5.2", "mini2@other.local")
    assert await nodes_of("ring", text=named) == ["studio", "mini"]
    hosts = '["192.168.5.1:5555", "192.168.1.11:5555"]'
    assert await nodes_of("hostfile", text=hosts) == ["studio", "mini"]
    (tmp_path / "hosts.json").write_text(hosts)
    model = (EXAMPLES / "localai.yaml").read_text()
    words = ("--hostfile", str(tmp_path / "hosts.json"))
    assert await nodes_of("localai", *words, text=model) == ["studio", "mini"]
    static = "workers: {static: [{ip: 192.168.1.11, name: other, priority: 1}, {ip: 192.168.5.1}]}"
    assert await nodes_of("serving", text=static) == ["mini", "studio"]
    mesh = "mesh: {discovery: {type: static, nodes: [{host: 192.168.5.1}, {host: other.local}]}}"
    assert await nodes_of("mesh", text=mesh) == ["studio", "other"]
    refused = await fleet.ctl("import", "hostfile", "-", stdin=b'["127.0.0.1:1", "10.0.0.9:1"]')
    assert "does not name the node of rank 0" in refused.err
    fleet.vanish()
    away = await fleet.ctl("import", "ring", "-", stdin=ring.encode())
    assert "API_HOST: does not name the node of 192.168.5.1. Give --nodes" in away.err
    assert "a fleet whose agents report the address" in away.err


LOCALAI = "name: a\nbackend: mlx-distributed\nparameters: {model: a}\n"
TIERS = "models: {tier_preferences: %s}"
REFUSED = [
    ("localai", "name: a\nbackend: llama-cpp", "2:10: backend: is llama-cpp, which does not use"),
    ("localai", f"{LOCALAI}context_size: 3", "4:15: context_size: results in an invalid Model"),
    ("localai", f"{LOCALAI}options: ['hostfile:none.json']", "none.json: does not exist"),
    ("localai", f"{LOCALAI}options: ['temp:warm']", "options[0]: temp must be a number, got"),
    ("localai", f"{LOCALAI}options: ['distributed_backend:x']", "must be ring or jaccl"),
    ("localai", "- a\n- b", "[1]: expected a model: name"),
    ("localai", "[]", "names no models"),
    ("mesh", "mesh:\n  routing: {strategy: fastest}", "'fastest'. Known values are: scored"),
    ("mesh", "mesh: {discovery: {type: static}}", "lists no Macs. Add below it: nodes: "),
    ("mesh", "mesh: {discovery: [{type: nats}]}", "discovery[0].type: has the unknown value"),
    ("mesh", "mesh: {discovery: [mdns, bonjour]}", "mesh.discovery[1]: has the unknown value"),
    ("mesh", "mesh: {role: auto, health: {interval: 0.2}}", "is 0.2 s; give 1 to 3600 s"),
    ("mesh", "mesh: {discovery: {type: static, nodes: [{host: 10.0.0.3}]}}", "Give --nodes"),
    ("mesh", "mesh: {password: hunter2, url: 'https://x'}", "is not mesh YAML"),
    ("mesh", "role: admin", "is not mesh YAML"),
    ("mesh", "- discovery", "is not mesh YAML"),
    ("serving", "workers: [{name: a, priority: high}]", "expected a number of 0 or more, got"),
    ("serving", "workers: [{name: a, priority: 101}]", "priority: results in an invalid NodePool"),
    ("serving", "workers: [{name: a}, {name: a}]", "workers[1]: is the second Mac named a"),
    ("serving", TIERS % "{'<3B': 8}", "expected a mapping"),
    ("serving", TIERS % "{'<3B': {colour: red}}", "prefers no Macs"),
    ("serving", TIERS % "{'<3B': {preferred_chips: [M9]}}", "no chip that Apple sold"),
    ("serving", TIERS % "{'<3B': {preferred_workers: [10.0.0.9]}}", "names no node"),
    ("serving", TIERS % "{large: {min_gpu_cores: 8}}", "names no size of models"),
    ("ring", "API_HOST", "standard input: is not an .env file"),
    ("ring", "API_HOST=a.local\nNUM", "standard input:2:1: expected NAME=VALUE"),
    ("ring", "LOG_LEVEL=INFO", "sets no variable of mlx_dist"),
    ("ring", "mesh:\n  role: auto", "Did you mean import mesh"),
    ("ring", "API_HOST=a.b\nWORKER_HOSTS=b.b\nNUM_DEVICES=3", "is 3, but API_HOST and WORKER_HOS"),
    ("ring", "API_HOST=a.b\nWORKER_HOSTS=b.b\nDISTRIBUTED_BACKEND=nccl", "unknown value 'nccl'"),
    ("jaccl", "QUEUE_MAX=8", "names no model: MODEL_DIR is not set"),
    ("jaccl", "MODEL_DIR=$(HOME)/m", "MODEL_DIR: is an expression"),
    ("jaccl", "MODEL_DIR=m\nQUEUE_MAX=many", "QUEUE_MAX: expected a number"),
    ("jaccl", "LOG_LEVEL=info", "sets no variable of mlx-jaccl-cluster"),
    ("jaccl", "MODEL_DIR=m\nHOSTFILE=nowhere.json", "nowhere.json"),
    ("hostfile", '["10.0.0.1:5555"]', "Give --nodes NODE"),
]


@pytest.mark.parametrize(("verb", "text", "message"), REFUSED)
def test_what_cannot_be_converted_is_refused_by_name(
    verb: str, text: str, message: str, tmp_path: Path
) -> None:
    words = ("--model", "a/m-1B") if verb == "serving" else ()
    done = run(verb, "-", "-o", str(tmp_path / "made.yaml"), *words, stdin=text)
    assert done.exit_code == 1
    assert done.output.startswith("error: nothing was imported:\n")
    assert message in done.output
    assert "hunter2" not in done.output
    assert not (tmp_path / "made.yaml").exists()


def test_files_that_declare_nothing_and_lists_of_nodes_that_are_too_short_are_refused() -> None:
    nothing = run("serving", "-", stdin="mode: dual")
    assert "so there is nothing to declare" in nothing.output
    assert "fleetctl join" in nothing.output
    short = run("ring", "-", "--nodes", "x", stdin="API_HOST=a.local\nWORKER_HOSTS=b.local")
    assert "names 2 Macs, but --nodes names 1" in short.output


@pytest.mark.parametrize("verb", ["mesh", "serving", "localai"])
@pytest.mark.parametrize(
    "text", ["HF_TOKEN=hf_SECRET12\nAPI_KEY=sk-live-999\n", "# a\nA=sk-1\n\nB='hf_SECRET12' # c\n"]
)
def test_a_file_of_secrets_is_refused_and_not_shown(verb: str, text: str) -> None:
    done = run(verb, "-", stdin=text)
    assert done.exit_code == 1
    assert "expected YAML with fields, got one bare value" in done.output
    assert "did you mean import ring?" in done.output
    assert "SECRET" not in done.output
    assert "sk-" not in done.output


def test_secrets_are_listed_but_not_shown() -> None:
    text = "a: {hub_token: hf_123, url: 'https://me:pw@host/x', max_tokens: 5, keyring: k, env: ['HF_TOKEN=x1']}"
    [document] = read_documents(text, "f.yaml")
    assert Source(document).omission_lines({"a": "so"}) == [
        "so:",
        "  line 1: a.hub_token: (a secret, not copied)",
        "  line 1: a.url: https://host/x",
        "  line 1: a.max_tokens: 5",
        "  line 1: a.keyring: k",
        "  line 1: a.env[0]: (a secret, not copied)",
    ]


@pytest.mark.parametrize("mark", ["\x1b[31m", "x" * 5000])
def test_hostile_comments_are_cleaned(mark: str) -> None:
    text = f"# {mark} by Anna\nMODEL_REPO=a/b\nAPI_HOST=a.local\nWORKER_HOSTS=b.local"
    done = run("ring", "-", stdin=text)
    assert (done.exit_code, "\x1b" in done.output) == (0, False)
    assert max(map(len, done.output.splitlines())) < 500


@settings(max_examples=samples(60), deadline=None)
@given(
    parts=st.dictionaries(
        st.sampled_from(["modelLoaded", "memoryHeadroom", "queueDepth", "prefixAffinity"]),
        st.integers(0, 1000).map(lambda number: number / 1000),
        min_size=1,
    ).filter(lambda parts: any(parts.values()))
)
def test_weights_keep_their_proportions(parts: dict[str, float]) -> None:
    [document] = read_documents("\n".join(f"{name}: {part}" for name, part in parts.items()), "f")
    weights = drafts.scale_weights(Source(document), {name: (name,) for name in parts})
    assert weights is not None
    whole = {name: int(str(weight)) for name, weight in weights.items()}
    assert all(0 <= weight <= 1000 for weight in whole.values())
    most = max(parts, key=lambda name: parts[name])
    for name, part in parts.items():
        assert whole[name] / whole[most] == pytest.approx(part / parts[most], abs=0.001)
