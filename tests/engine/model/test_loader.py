"""The model loader: progress, stops, number types, and templates that refuse messages."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from engine.errors import PromptRefusedError, StoppedError
from engine.gauges import Gauges
from models import model_files
from models.model_files import ModelUnusableError
from schemas.vision import Vision
from tests.support.engine_batches import PROMPTS, drain, job, load, new_batch
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def test_progress_is_visible_while_loading(tiny: Path) -> None:
    gauges = Gauges()
    load(tiny, gauges)
    assert gauges.loaded_bytes == gauges.total_bytes == model_files.inspect_model(tiny).weight_bytes
    assert gauges.active_bytes > 0


def test_loading_stops_on_request(tiny: Path) -> None:
    loader = module("engine.model.loader")
    facts = model_files.inspect_model(tiny)
    with pytest.raises(StoppedError):
        loader.load(tiny, facts, Gauges(), is_stopping=lambda: True)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS computes in the weights' own type")
@pytest.mark.parametrize("is_quantized", [True, False])
def test_half_precision_becomes_float32_on_linux(tmp_path: Path, *, is_quantized: bool) -> None:
    mx, tree_flatten = module("mlx.core"), module("mlx.utils").tree_flatten
    folder = module("tests.support.tiny_model").make(tmp_path / "half", dtype="float16")
    if is_quantized:
        packed = tmp_path / "packed"
        options = {"quantize": True, "q_group_size": 32, "dtype": "float16"}
        module("mlx_lm").convert(str(folder), str(packed), **options)
        folder = packed
    loaded = load(folder)
    kinds = {array.dtype for _, array in tree_flatten(loaded.model.parameters())}
    assert kinds == ({mx.float32, mx.uint32} if is_quantized else {mx.float32})
    batch = new_batch(loaded, folder)
    batch.add(job(0, PROMPTS[1]))
    assert len(drain(batch)[0]) > 0


def test_a_template_that_refuses_messages_is_a_client_error(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "strict")
    path = folder / "tokenizer_config.json"
    template = "{{ raise_exception('roles must alternate') }}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    codec = load(folder).codec
    with pytest.raises(PromptRefusedError, match="roles must alternate"):
        codec.encode_chat([{"role": "user", "content": "x"}])


def test_images_need_a_known_architecture_and_mlx_vlm(tiny: Path, tmp_path: Path) -> None:
    loader = module("engine.model.loader")

    def refusal(folder: Path) -> str:
        facts = model_files.inspect_model(folder)
        options = loader.LoadOptions(vision=Vision())
        with pytest.raises(ModelUnusableError) as refused:
            loader.load(folder, facts, Gauges(), is_stopping=lambda: False, options=options)
        return str(refused.value)

    assert "is for qwen2_vl, qwen2_5_vl, qwen3_vl, " in refusal(tiny)
    folder = tmp_path / "seeing"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen2_vl"}
    (folder / "config.json").write_text(json.dumps(config))
    if importlib.util.find_spec("mlx_vlm") is None:
        assert "install mlx-fleet[vision]" in refusal(folder)
