"""Attention over runs against float64: grouped heads, lengths, masks, sinks, every route."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache import attend as module
from veloxquant.cache.attend import Fresh, attend, decode_range
from veloxquant.cache.store import Store
from veloxquant.kernels import dispatch
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.plain import PlainSpec

ROUTES = ["packed", "tiled", "free"]


@pytest.fixture(params=ROUTES)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which implementation serves: packed products, decoded tiles, or what the library picks."""
    if request.param != "free":
        monkeypatch.setattr(dispatch, "route", lambda **_: "reference")
        monkeypatch.setattr(module, "PACKED_ROWS", 10**6 if request.param == "packed" else 0)
    monkeypatch.setattr(module, "TILE_TOKENS", 48)
    return request.param


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def runs(batch: int, heads: int, k_dim: int, v_dim: int, fresh: int, *, exact: bool = False):
    """History in several forms, keys and values cut at different tokens, then fresh rows."""

    def store(spec, dim: int, n: int, seed: int) -> Store:
        out = Store(codec_for(PlainSpec() if exact else spec, dim), 32)
        out.append(normal(batch, heads, n, dim, seed=seed))
        return out

    keys = [
        store(PlainSpec(), k_dim, 5, 1),
        store(AffineChannelSpec(2, 32), k_dim, 64, 2),
        store(CodebookSpec(2, 3, unbiased=True), k_dim, 11, 3),
        Fresh(normal(batch, heads, fresh, k_dim, seed=4)),
    ]
    values = [
        store(AffineTokenSpec(4, 32), v_dim, 40, 5),
        store(CodebookSpec(3, 3, unbiased=False), v_dim, 40, 6),
        Fresh(normal(batch, heads, fresh, v_dim, seed=7)),
    ]
    return keys, values, 80 + fresh


def reference(q, keys, values, scale, mask, sinks) -> np.ndarray:
    total = sum(k.length for k in keys)
    k, v = (
        np.array(decode_range(side, 0, total, mx.float32), dtype=np.float64)
        for side in (keys, values)
    )
    q = np.array(q, dtype=np.float64)
    repeat = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    logits = q @ k.swapaxes(-1, -2) * scale
    n = q.shape[2]
    if isinstance(mask, str):
        logits[..., ~np.tril(np.ones((n, total), dtype=bool), total - n)] = -np.inf
    elif mask is not None:
        m = np.array(mask)
        logits = np.where(m, logits, -np.inf) if m.dtype == bool else logits + m
    if sinks is not None:
        edge = np.broadcast_to(np.array(sinks, dtype=np.float64)[None, :, None, None],
                               (*logits.shape[:3], 1))  # fmt: skip
        logits = np.concatenate([edge, logits], axis=-1)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights[..., 1:] if sinks is not None else weights) @ v


def array_mask(kind: str, batch: int, n_q: int, n: int, total: int):
    if kind in ("none", "causal"):
        return None if kind == "none" else "causal"
    draw = np.random.default_rng(5)
    lead = {"2d": (), "4d": (batch, 1), "heads": (1, n_q), "3d": (1,), "row": (batch, 1)}
    shape = (*lead[kind.split("-")[1]], 1 if kind.endswith("row") else n, total)
    visible = draw.random(shape) < 0.6
    visible[..., 0] = True
    if kind.startswith("bool"):
        return mx.array(visible)
    bias = np.where(visible, draw.standard_normal(shape), -np.inf).astype(np.float32)
    return mx.array(bias)


MASKS = ["none", "causal", "bool-2d", "bool-3d", "bool-4d", "bool-heads", "bool-row", "add-2d",
         "add-4d", "add-heads"]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_every_route_agrees_with_float64(
    path: str, mask: str, length: int, repeat: int, with_sinks: bool
) -> None:
    keys, values, total = runs(2, 2, 32, 64, length)
    q = normal(2, 2 * repeat, length, 32, seed=9)
    made = array_mask(mask, 2, 2 * repeat, length, total)
    sinks = normal(2 * repeat, seed=10) if with_sinks else None
    out = attend(q, keys, values, n_kv=2, v_dim=64, scale=0.3, mask=made, sinks=sinks)
    wanted = reference(q, keys, values, 0.3, made, sinks)
    assert out.shape == wanted.shape
    assert np.abs(np.array(out) - wanted).max() < 2e-5


@pytest.mark.parametrize("length", [1, 2, 50])
def test_exact_rows_agree_with_the_stock_kernel(path: str, length: int) -> None:
    keys, values, total = runs(1, 2, 64, 64, length, exact=True)
    q = normal(1, 6, length, 64, seed=11)
    out = attend(q, keys, values, n_kv=2, v_dim=64, scale=0.125, mask="causal")
    rows = [decode_range(side, 0, total, mx.float32) for side in (keys, values)]
    stock = mx.fast.scaled_dot_product_attention(q, *rows, scale=0.125, mask="causal")
    assert mx.abs(out - stock).max().item() < 1e-5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_the_output_has_the_type_of_the_queries(path: str, dtype: mx.Dtype) -> None:
    keys, values, _ = runs(1, 1, 32, 32, 2)
    q = normal(1, 2, 2, 32, seed=12).astype(dtype)
    out = attend(q, keys, values, n_kv=1, v_dim=32, scale=0.2, mask="causal")
    assert out.dtype == dtype
    wanted = reference(q.astype(mx.float32), keys, values, 0.2, "causal", None)
    assert np.abs(np.array(out.astype(mx.float32)) - wanted).max() < 2e-2


def test_large_logits_stay_finite(path: str) -> None:
    keys, values, _ = runs(1, 1, 32, 32, 3)
    q = 1e4 * normal(1, 2, 3, 32, seed=13)
    out = attend(q, keys, values, n_kv=1, v_dim=32, scale=1.0, mask="causal")
    assert mx.isfinite(out).all().item()
    wanted = reference(q, keys, values, 1.0, "causal", None)
    assert np.abs(np.array(out) - wanted).max() < 2e-2


def test_queries_in_chunks_change_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, total = runs(1, 2, 32, 32, 30)
    q = normal(1, 4, 30, 32, seed=14)
    sinks = normal(4, seed=15)
    for kind in ("causal", "bool-heads", "bool-row", "add-4d"):
        mask = array_mask(kind, 1, 4, 30, total)
        wanted = reference(q, keys, values, 0.2, mask, sinks)
        for limit in (1, 48 * 2 * 2 * 4 * 7, 64 << 20):
            monkeypatch.setattr(module, "SCORE_BYTES", limit)
            out = attend(q, keys, values, n_kv=2, v_dim=32, scale=0.2, mask=mask, sinks=sinks)
            assert np.abs(np.array(out) - wanted).max() < 2e-5, limit


def test_bad_masks_are_refused() -> None:
    keys, values, total = runs(1, 1, 32, 32, 1)
    q = normal(1, 1, 1, 32, seed=16)
    with pytest.raises(ValueError, match=f"covers 7 tokens, the cache holds {total}"):
        attend(q, keys, values, n_kv=1, v_dim=32, scale=1.0, mask=mx.zeros((1, 7)))
    with pytest.raises(ValueError, match="banana"):
        attend(q, keys, values, n_kv=1, v_dim=32, scale=1.0, mask="banana")


@settings(deadline=None, max_examples=25)
@given(start=st.integers(0, 84), size=st.integers(1, 84))
def test_ranges_cross_runs(start: int, size: int) -> None:
    keys, _, total = runs(1, 1, 32, 32, 4)
    stop = min(start + size, total)
    if start < stop:
        whole = decode_range(keys, 0, total, mx.float32)
        part = decode_range(keys, start, stop, mx.float32)
        assert mx.abs(part - whole[:, :, start:stop]).max().item() < 1e-5
