"""Runs of vector codes and of sparse slots, and what broken scores give."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.cache.attend import Fresh, attend
from veloxquant.cache.store import Store
from veloxquant.kernels import dispatch, native
from veloxquant.kernels.native import SPARSE, VECTOR, NativeRun
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.polar import PolarSpec

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the optional compiled kernel was not built"
)
TOKENS, HEADS, DIM, REPEAT = 150, 2, 96, 3


class Coded(Fresh):
    """Rows with the run that the kernel should read as the same rows."""

    def __init__(self, rows: np.ndarray, run: NativeRun) -> None:
        super().__init__(mx.array(rows))
        self.run = run

    def native(self) -> NativeRun:
        return self.run


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the last axis as one little-endian bit stream in uint32 words."""
    spread = (codes[..., None] >> np.arange(bits)) & 1
    flat = spread.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    missing = -flat.shape[-1] % 32
    flat = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, missing)])
    return np.packbits(flat, axis=-1, bitorder="little").view(np.uint32)


@pytest.fixture(autouse=True)
def taken(monkeypatch) -> list[bool]:
    """What the kernel answered; a refusal would leave the reference to be compared with itself."""
    answers: list[bool] = []
    compute = native.attend

    def attend_and_note(*args, **call) -> bool:
        answers.append(compute(*args, **call))
        return answers[-1]

    monkeypatch.setattr(native, "attend", attend_and_note)
    return answers


def agree(first: Coded, second: Coded, taken: list[bool]) -> None:
    q = mx.random.normal((2, HEADS * REPEAT, 1, DIM), key=mx.random.key(1))
    call = {"n_kv": HEADS, "v_dim": DIM, "scale": DIM**-0.5, "mask": None}
    for keys, values in ((first, second), (second, first)):
        fast = attend(q, [keys], [values], **call)
        plain = attend(q, [keys], [values], use_kernels=False, **call)
        np.testing.assert_allclose(fast, plain, atol=1e-5)
    assert taken == [True, True]


def vector_rows(rng, bits, sub, shared, *, signs: bool, norms: bool, dtype) -> Coded:
    parts = DIM // sub
    shape = (1, 1, 1) if shared else (2, HEADS, parts)
    book = rng.normal(size=(*shape, 1 << bits, sub)).astype(dtype)
    codes = rng.integers(0, 1 << bits, (2, HEADS, TOKENS, parts))
    wide = np.broadcast_to(book, (2, HEADS, parts, 1 << bits, sub)).astype(np.float32)
    rows = np.take_along_axis(wide, codes.swapaxes(2, 3)[..., None], axis=3).swapaxes(2, 3)
    rows = rows.reshape(2, HEADS, TOKENS, DIM)
    plane = factor = None
    if signs:
        up = rng.integers(0, 2, rows.shape)
        plane, rows = mx.array(stream(up, 1)), np.where(up, rows, -rows)
    if norms:
        scale = rng.random((2, HEADS, TOKENS, 1)).astype(np.float32)
        factor, rows = mx.array(scale), rows * scale
    run = NativeRun(
        VECTOR, mx.array(stream(codes, bits)), 0, TOKENS, DIM, bits, sub,
        scale=factor, book=mx.array(book), signs=plane,
    )  # fmt: skip
    return Coded(rows.astype(np.float32), run)


@pytest.mark.parametrize("bits", [1, 7, 8, 12, 16])
@pytest.mark.parametrize("shared", [True, False])
def test_vector_codes_of_any_width_agree(bits, shared, taken):
    rng = np.random.default_rng(bits)
    sub = 8 if bits > 8 else 4
    keys = vector_rows(rng, bits, sub, shared, signs=False, norms=True, dtype=np.float32)
    values = vector_rows(rng, 8, 8, shared, signs=True, norms=False, dtype=np.float16)
    agree(keys, values, taken)


@pytest.mark.parametrize("index", [np.uint8, np.uint16])
def test_sparse_slots_agree_and_skip_empty_ones(index, taken):
    rng = np.random.default_rng(3)
    slots = 3
    channel = rng.permuted(np.tile(np.arange(DIM + 1), (2, HEADS, TOKENS, 1)), axis=-1)[..., :slots]
    channel[..., 0] = DIM  # an empty slot
    value = rng.normal(size=channel.shape).astype(np.float32)
    rows = np.zeros((2, HEADS, TOKENS, DIM + 1), np.float32)
    np.put_along_axis(rows, channel, value, axis=-1)
    run = NativeRun(
        SPARSE, mx.array(channel.astype(index)), 0, TOKENS, slots, scale=mx.array(value)
    )
    dense = vector_rows(rng, 8, 8, shared=True, signs=False, norms=False, dtype=np.float32)
    agree(Coded(rows[..., :DIM], run), dense, taken)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_keys_give_broken_output(broken):
    keys, values = Fresh(mx.full((1, 1, 4, 64), broken)), Fresh(mx.ones((1, 1, 4, 64)))
    out = attend(mx.ones((1, 1, 1, 64)), [keys], [values], n_kv=1, v_dim=64, scale=1.0, mask=None)
    assert mx.isnan(out).all().item()


@pytest.mark.parametrize("use_kernels", [None, False])
def test_a_query_that_may_see_nothing_gives_zeros(use_kernels):
    rows = Fresh(mx.ones((1, 1, 4, 64)))
    mask = mx.zeros((1, 4), dtype=mx.bool_)
    out = attend(
        mx.ones((1, 1, 1, 64)), [rows], [rows], n_kv=1, v_dim=64, scale=1.0, mask=mask,
        use_kernels=use_kernels,
    )  # fmt: skip
    assert (out == 0).all().item()


@pytest.mark.parametrize("dim", [64, 80, 96, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_polar_trees_of_any_size_agree(dim, bits, taken):
    rows = mx.random.normal((1, 2, 140, dim), key=mx.random.key(bits))
    store = Store(codec_for(PolarSpec(bits, 3, unbiased=True), dim), 128)
    store.append(rows)
    q = mx.random.normal((1, 2 * REPEAT, 1, dim), key=mx.random.key(9))
    call = {"n_kv": 2, "v_dim": dim, "scale": dim**-0.5, "mask": None}
    fast = attend(q, [store], [store], **call)
    plain = attend(q, [store], [store], use_kernels=False, **call)
    np.testing.assert_allclose(fast, plain, atol=1e-5)
    assert taken == [True]
    with dispatch.arrays_only(True):
        unpacked = store.decode(0, 140, mx.float32)
    np.testing.assert_allclose(store.decode(0, 140, mx.float32), unpacked, atol=1e-5)


def test_runs_of_other_lengths_than_the_call_are_refused():
    rows = mx.random.normal((1, 1, 8, 64))
    run = Fresh(rows).native()
    q, out = np.ones((1, 1, 1, 64), np.float32), np.zeros((1, 1, 1, 64), np.float32)
    call = {"length": 1, "causal": False, "sinks": None, "mask": None, "threads": 1}
    part = Fresh(rows).native()._replace(stop=7)
    assert native.attend([q], [run], [run], [out], tokens=8, **call)
    assert not native.attend([q], [run], [run], [out], tokens=7, **call)
    assert not native.attend([q], [run._replace(stop=9)], [run], [out], tokens=9, **call)
    added = frozenset([id(part)])
    assert not native.attend([q, q], [run, part], [run], [out], tokens=8, added=added, **call)
