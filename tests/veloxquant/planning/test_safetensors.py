import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.planning.safetensors import HeaderError, read_header


def file_of(header: object, body: int) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(body)


def entry(dtype: str = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> dict:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_read_header_gives_types_shapes_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(entry() | {"__metadata__": {"format": "mlx"}}, 16))
    tensors = read_header(path)
    assert list(tensors) == ["a"]
    assert tensors["a"] == ("F32", (2, 2), 16)
    assert tensors["a"].size == 4


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty or cut short"),
        (b"\xff" * 8, "names a header"),
        (file_of(b"[[[[", 0), "not JSON"),
        (file_of(b"[" * 100_000, 0), "not JSON"),
        (file_of([1], 0), "not a table"),
        (file_of(entry(), 12), "cut short"),
        (file_of(entry(), 20), "names 16"),
        (file_of(entry(shape=(3, 2)), 16), "shape"),
        (file_of(entry(shape=(-2, -2)), 16), "cut short"),
        (file_of(entry(offsets=(8, 0)), 16), "cut short"),
        (file_of(entry(offsets="ab"), 16), "cannot be read"),
        (file_of({"a": 3}, 16), "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_read_header_refuses_a_damaged_file(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(HeaderError, match=says):
        read_header(path)


@given(st.binary(max_size=200))
def test_read_header_raises_nothing_else(tmp_path_factory: pytest.TempPathFactory, raw: bytes):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(raw)
    with contextlib.suppress(HeaderError):
        read_header(path)
