"""Groups and who names them: what is refused when it is applied, and when a group is deleted."""

import pytest

from machinery.clock import SystemClock
from manifests import apply, delete
from manifests.errors import InUseError
from manifests.validate import StoreNames, validate
from store.port import Transport
from tests.manifests.making import HEAD, deployment, read

CLOCK = SystemClock()
SHARDED = deployment(rest="  sharding: pair\n")


def group(spec: str, *, name: str = "pair") -> str:
    """Return a group of a and b with more lines in its spec."""
    head = f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: {name}}}\nspec:\n"
    return f"{head}  members: [{{node: a}}, {{node: b}}]\n{spec}"


PAIR = group("")

CASES = [
    pytest.param(SHARDED + PAIR, StoreNames(), [], id="beside-it"),
    pytest.param(SHARDED, StoreNames(shard_groups=frozenset({"pair"})), [], id="in-the-store"),
    pytest.param(deployment(rest="  sharding: Auto\n"), StoreNames(), [], id="auto-names-none"),
    pytest.param(
        SHARDED,
        StoreNames(shard_groups=frozenset({"pairs", "trio"})),
        [
            "spec.sharding: there is no ShardGroup pair. Did you mean pairs? Create it first, or apply "
            "its manifest together with this one"
        ],
        id="misspelled",
    ),
    pytest.param(
        group("  fallbacks: [{parallelism: Pipeline}, {model: qwen-4bit}]\n"),
        StoreNames(),
        [],
        id="sensible-fallbacks",
    ),
    pytest.param(
        group("  parallelism: Tensor\n  fallbacks: [{parallelism: Tensor}]\n"),
        StoreNames(),
        [
            "spec.fallbacks[0]: comes to the same as the group itself, which has failed by then. "
            "Change its parallelism, size or model, or remove it"
        ],
        id="no-fallback",
    ),
    pytest.param(
        group("  fallbacks: [{model: small}, {model: small, size: 2}]\n"),
        StoreNames(),
        [
            "spec.fallbacks[1]: comes to the same as an earlier fallback, which has failed by then. "
            "Change its parallelism, size or model, or remove it"
        ],
        id="the-same-again",
    ),
    pytest.param(
        group("  fallbacks: [{size: 3}]\n"),
        StoreNames(),
        [
            "spec.fallbacks[0].size: is 3, and the group has 2 members. "
            "Fall back on fewer Macs, not on more"
        ],
        id="more-than-there-are",
    ),
    pytest.param(
        f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: g}}\nspec:\n  selector: {{}}\n  size: 4\n"
        "  backend: jaccl\n  fallbacks: [{size: 9}]\n",
        StoreNames(),
        ["spec.fallbacks[0].size: is 9, and JACCL connects 8 at most. Use 8 or fewer"],
        id="more-than-jaccl-connects",
    ),
    pytest.param(
        f"---\n{HEAD}kind: ShardGroup\nmetadata: {{name: g}}\nspec:\n"
        "  members: [{node: a, rdma: {c: [rdma_en5], a: [rdma_en4]}}, {node: b}]\n",
        StoreNames(),
        [
            "spec.members[0].rdma.c: c is no member of the group. Name the devices towards each of "
            "the other members",
            "spec.members[0].rdma.a: a is the member itself. Name the devices towards each of the "
            "other members",
        ],
        id="devices-towards-strangers",
    ),
]


@pytest.mark.parametrize(("text", "known", "wanted"), CASES)
def test_what_is_checked(text: str, known: StoreNames, wanted: list[str]) -> None:
    found = [str(problem) for problem in validate(read(text), known)]
    assert len(found) == len(wanted)
    for line, end in zip(found, wanted, strict=True):
        assert line.endswith(end)


async def test_a_group_that_is_named_stays(transport: Transport) -> None:
    await apply.apply(transport, read(PAIR + SHARDED), CLOCK)
    with pytest.raises(InUseError) as caught:
        await delete.delete(transport, "ShardGroup", "pair", CLOCK)
    assert str(caught.value) == (
        "ShardGroup/pair is named by ModelDeployment/qwen. Change or delete it first"
    )
    await apply.apply(transport, read(deployment()), CLOCK)
    await delete.delete(transport, "ShardGroup", "pair", CLOCK)


async def test_the_store_is_asked_for_the_group(transport: Transport) -> None:
    await apply.apply(transport, read(PAIR), CLOCK)
    await apply.apply(transport, read(SHARDED), CLOCK)
