"""Several adapters in one batch: each row's text is that of its adapter alone, and others cost nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from models.model_files import ModelUnusableError
from tests.support.engine_adapters import is_same, load_adapted, logits, make_adapter, write_peft
from tests.support.engine_batches import PROMPTS, job, new_batch, run
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]

ROWS = ["law", "", "poems", "code", "law", "", "poems", "law"]


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return three adapters of other ranks and layers, one in PEFT's format."""
    out = tmp_path_factory.mktemp("adapters")
    code = make_adapter(out / "mlx", tiny, rank=2, seed=9, keys=("self_attn.v_proj", "mlp.up_proj"))
    return {
        "law": make_adapter(out / "law", tiny),
        "poems": make_adapter(out / "poems", tiny, rank=16, seed=8),
        "code": write_peft(out / "code", code),
    }


@pytest.fixture(scope="module")
def loaded(tiny: Path, folders: Mapping[str, Path]) -> Any:
    return load_adapted(tiny, folders)


@pytest.fixture
def bank(loaded: Any) -> Any:
    loaded.adapters.select([])  # as after loading
    return loaded


@pytest.fixture(scope="module")
def alone(tiny: Path, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return the model with each adapter loaded as the only one, and with none."""
    return {"": load_adapted(tiny)} | {
        name: load_adapted(tiny, folder) for name, folder in folders.items()
    }


def salted(number: int, prompt: list[int], adapter: str) -> Any:
    return job(number, prompt, adapter=adapter, cache_salt=adapter)


@pytest.mark.ci
@pytest.mark.parametrize("rows", [ROWS, ["law"] * 4, [""] * 4, ["code", "poems"]])
def test_each_row_of_a_batch_is_as_with_its_adapter_alone(
    tiny: Path, bank: Any, alone: dict[str, Any], rows: list[str]
) -> None:
    batch = new_batch(bank, tiny)
    jobs = [salted(at, PROMPTS[at], adapter) for at, adapter in enumerate(rows)]
    together = run(batch, *jobs)
    # A second time: from the prefix cache, in another order.
    assert run(batch, *reversed(jobs)) == together
    for at, adapter in enumerate(rows):
        (expected,) = run(new_batch(alone[adapter], tiny), job(at, PROMPTS[at])).values()
        assert together[at] == expected, (at, adapter)


def test_one_prompt_differs_by_adapter_also_with_a_warm_cache(tiny: Path, bank: Any) -> None:
    batch = new_batch(bank, tiny)
    names = ["", "law", "poems", "code"]
    cold = run(batch, *(salted(at, PROMPTS[5], name) for at, name in enumerate(names)))
    assert len({tuple(made) for made in cold.values()}) == len(names)
    warm = {
        at: run(batch, salted(at, PROMPTS[5], name))[at]
        for at, name in reversed([*enumerate(names)])
    }
    assert warm == cold


def test_rows_join_and_leave_with_their_adapters(
    tiny: Path, bank: Any, alone: dict[str, Any]
) -> None:
    batch = new_batch(bank, tiny, concurrency=2)
    sizes = [3, 25, 9, 14, 30, 5, 12, 7]
    jobs = [
        job(at, PROMPTS[at], adapter=name, cache_salt=name, max_tokens=sizes[at])
        for at, name in enumerate(ROWS)
    ]
    together = run(batch, *jobs)
    for at, name in enumerate(ROWS):
        alone_job = job(at, PROMPTS[at], max_tokens=sizes[at])
        assert together[at] == run(new_batch(alone[name], tiny), alone_job)[at], (at, name)


def test_a_batch_without_adapters_computes_what_it_did(
    tiny: Path, bank: Any, alone: dict[str, Any]
) -> None:
    """Check the same numbers, and the same operations: not one array more is computed."""
    bank.adapters.select(["", ""])
    assert is_same(logits(bank.model), logits(alone[""].model))
    assert operations(bank.model) == operations(alone[""].model)
    bank.adapters.select(["law"])
    assert operations(bank.model) > operations(alone[""].model)
    assert is_same(logits(bank.model), logits(alone["law"].model))


def operations(model: Any) -> int:
    """Return the number of operations of a pass."""
    from io import StringIO  # noqa: PLC0415 - beside its only use

    out = StringIO()
    module("mlx.core").export_to_dot(out, logits(model))
    return out.getvalue().count("shape=rectangle")


def test_weights_of_all_adapters_count(tiny: Path, bank: Any, folders: Mapping[str, Path]) -> None:
    files = module("models.adapter_files")
    sizes = [
        files.inspect_adapter(folder).bytes_in_memory(casts_to_float32=False)
        for folder in folders.values()
    ]
    arrays = module("mlx.utils").tree_flatten(bank.model.parameters())
    assert sum(array.nbytes for name, array in arrays if ".lora_" in name) == sum(sizes)


def test_dora_and_adapters_of_other_models_are_refused(
    tiny: Path, other: Path, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    dora = make_adapter(tmp_path / "dora", tiny, kind="dora")
    with pytest.raises(ModelUnusableError, match=r"DoRA cannot be chosen by request; deploy it by"):
        load_adapted(tiny, {"law": folders["law"], "dora": dora})
    with pytest.raises(ModelUnusableError, match=r"law .rank 4. is not for this model: 4 of its"):
        load_adapted(other, {"law": folders["law"]})
