"""The pooling configuration of a model folder: read, or refused by file."""

from pathlib import Path
from typing import Any

import pytest

from engine.model import pooler
from models import model_files
from models.model_files import ModelUnusableError
from tests.support.engine_embedders import make_embedder, pooling, write_json

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def write_old_names(folder: Path) -> None:
    """Write the names of earlier versions of sentence-transformers."""
    switches = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write_json(folder, "1_Pooling/config.json", {"word_embedding_dimension": 64, **switches})
    write_json(folder, "sentence_bert_config.json", {"max_seq_length": 77, "do_lower_case": False})
    prompts = {
        "prompts": {"doc": "doc: "},
        "default_prompt_name": "doc",
        "similarity_fn_name": "cosine",
    }
    write_json(folder, "config_sentence_transformers.json", prompts)


def test_the_configuration_of_a_folder_is_read(tiny: Path, tmp_path: Path) -> None:
    facts = model_files.inspect_model(tiny)
    assert pooler.read_config(tiny, facts) is None
    embedder = make_embedder(tiny, tmp_path / "one", normalize=False)
    assert pooler.read_config(embedder, facts) == pooling("lasttoken")
    write_old_names(embedder)
    assert pooler.read_config(embedder, facts) == pooler.PoolerConfig(
        mode="mean", width=64, is_normalized=False, max_tokens=77, prefix="doc: "
    )
    write_json(embedder, "modules.json", [{"path": "", "type": "x.Transformer"}])
    assert pooler.read_config(embedder, facts) is None


WRONG: list[tuple[str, Any, str]] = [
    ("modules.json", {}, "modules.json: content: "),
    (
        "modules.json",
        [{"path": "1_Pooling", "type": "x.Pooling"}, {"path": "2", "type": "x.Dense"}],
        "Dense",
    ),
    ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling max is not supported"),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not"),
    (
        "1_Pooling/config.json",
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        "pooling_mode_cls_token and pooling_mode_mean_tokens",
    ),
    ("1_Pooling/config.json", {}, "pooling none is not supported"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
    ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "no prompt 'x'"),
    ("config.json", {"is_causal": False}, "attends in both directions"),
    ("config.json", {"use_bidirectional_attention": "all"}, "attends in both directions"),
]


@pytest.mark.parametrize(("name", "tree", "error"), WRONG, ids=lambda value: str(value)[:40])
def test_a_configuration_with_wrong_vectors_is_refused(
    tiny: Path, tmp_path: Path, name: str, tree: Any, error: str
) -> None:
    embedder = make_embedder(tiny, tmp_path / "wrong")
    facts = model_files.inspect_model(embedder)
    write_json(embedder, name, tree)
    with pytest.raises(ModelUnusableError, match=error) as caught:
        pooler.read_config(embedder, facts)
    assert name in str(caught.value)
    (embedder / "1_Pooling/config.json").unlink()
    with pytest.raises(ModelUnusableError):
        pooler.read_config(embedder, facts)
