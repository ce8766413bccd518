"""Headers of weight files: packed for the store, and written as a file without weights."""

import base64
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import weight_headers
from models.model_files import TensorHeader
from models.weight_headers import TensorShape, WeightHeaders
from tests.support.mlx_models import Late

mx = Late("mlx.core")

shapes = st.builds(
    lambda shape: TensorShape(dtype="F32", shape=tuple(shape), size=4),
    st.lists(st.integers(0, 9), max_size=4),
)
headers = st.builds(
    WeightHeaders,
    config=st.text(max_size=40),
    files=st.dictionaries(
        st.text(max_size=9), st.dictionaries(st.text(max_size=9), shapes, max_size=4), max_size=4
    ),
)


@given(headers)
def test_packed_headers_are_read_back(found: WeightHeaders) -> None:
    assert weight_headers.unpack(weight_headers.pack(found)) == found


@pytest.mark.parametrize("text", [
    pytest.param("", id="empty"),
    pytest.param("%%%", id="no base64"),
    pytest.param(base64.b64encode(b"plain").decode(), id="not compressed"),
    pytest.param(base64.b64encode(zlib.compress(b"{}")).decode(), id="other fields"),
    pytest.param(base64.b64encode(zlib.compress(b'{"config"')[:-3]).decode(), id="cut"),
    pytest.param(base64.b64encode(zlib.compress(b" " * (40 << 20))).decode(), id="a bomb"),
    pytest.param("A" * 500_000, id="too long"),
])  # fmt: skip
def test_what_is_no_packed_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="packed headers"):
        weight_headers.unpack(text)


def test_headers_that_are_too_long_are_not_packed() -> None:
    noise = random.Random(1).randbytes(500_000).hex()
    assert weight_headers.pack(WeightHeaders(config=noise, files={})) == ""


def test_a_tensor_without_a_shape_makes_no_headers() -> None:
    tensor = TensorHeader(dtype="F32", data_offsets=(0, 4))
    assert weight_headers.make_headers("{}", {"model.safetensors": {"a": tensor}}) is None


@pytest.mark.mlx
def test_a_skeleton_has_shapes_and_takes_no_room_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = 4 << 30
    tensors = {
        "big": TensorShape(dtype="F32", shape=(1 << 15, 1 << 15), size=size),
        "small": TensorShape(dtype="U32", shape=(2, 3), size=24),
    }
    weight_headers.write_skeleton(path, tensors)
    assert path.stat().st_blocks * 512 < 1 << 20
    arrays = mx.load(str(path))
    assert {name: tuple(one.shape) for name, one in arrays.items()} == {
        name: one.shape for name, one in tensors.items()
    }
