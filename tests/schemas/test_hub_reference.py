"""References to hubs: the kind of hub by field or endpoint, its default branch, and what a pin keeps."""

import pytest
from pydantic import ValidationError

from schemas.deployment import HubReference

REPO, COMMIT = "Qwen/Qwen3-8B-MLX-4bit", "ab" * 20


@pytest.mark.parametrize("fields", [
    {"source": "modelscope"},
    {"endpoint": "https://www.modelscope.cn"},
    {"endpoint": "https://modelscope.ai/"},
])  # fmt: skip
def test_modelscope_is_named_by_source_or_endpoint_and_has_its_own_default_branch(
    fields: dict[str, str],
) -> None:
    reference = HubReference.model_validate({"repo": REPO, **fields})
    assert (reference.source, reference.revision) == ("modelscope", "master")
    other = HubReference.model_validate({"repo": REPO, **fields, "revision": "v1"})
    assert other.revision == "v1"


@pytest.mark.parametrize("endpoint", ["https://modelscope.cn.example", "https://x/modelscope.cn"])
def test_another_host_is_not_taken_for_modelscope(endpoint: str) -> None:
    assert HubReference(repo=REPO, endpoint=endpoint).source == "huggingface"


def test_a_pin_keeps_the_branch_where_the_hub_is_asked_by_branch() -> None:
    scope = HubReference(repo=REPO, source="modelscope", revision="v1")
    pinned = scope.pinned_to(COMMIT, "https://www.modelscope.cn")
    assert (pinned.revision, pinned.branch) == (COMMIT, "v1")
    assert pinned.pinned_to(COMMIT, None) == pinned
    assert HubReference.model_validate_json(pinned.model_dump_json(by_alias=True)) == pinned
    assert HubReference(repo=REPO).pinned_to(COMMIT, None).branch is None


def test_a_branch_beside_a_branch_is_refused() -> None:
    with pytest.raises(ValidationError, match="write the branch as revision"):
        HubReference(repo=REPO, source="modelscope", revision="v1", branch="v1")
    with pytest.raises(ValidationError, match="only for a commit of source: modelscope"):
        HubReference(repo=REPO, revision=COMMIT, branch="main")
