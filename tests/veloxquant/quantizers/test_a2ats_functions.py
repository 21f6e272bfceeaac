"""Positions undone and redone, query-weighted geometry, retrieval by codes."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.a2ats import (
    a2ats_cholesky_factor,
    a2ats_h_weighted_assignment,
    a2ats_query_aware_assignment,
    a2ats_query_second_moment,
    a2ats_select_retrieval_set,
    fit_retrieval_codebook,
    shrunk_moment,
)
from veloxquant.quantizers.a2ats_rope import (
    PositionCode,
    a2ats_apply_exact_rope,
    a2ats_apply_far_query_rope,
    a2ats_apply_windowed_rope,
    rope_freqs_from_scaling,
    rope_remap_positions,
)
from veloxquant.quantizers.rope_vq import QueryWeighted, RetrievalCodec
from veloxquant.quantizers.specs.vector import RetrievalSpec
from veloxquant.quantizers.vq import VectorTable


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def worst(a: mx.array, b: mx.array) -> float:
    return mx.abs(a - b).max().item()


# ---- positions ------------------------------------------------------------------------------


def test_the_encoding_is_that_of_mlx_and_is_undone() -> None:
    x, at = normal(40, 64), mx.arange(500, 540)
    turned = a2ats_apply_exact_rope(x, at)
    stock = mx.fast.rope(x[None], 64, traditional=False, base=10000.0, scale=1.0, offset=500)[0]
    assert worst(turned, stock) < 1e-3
    assert worst(a2ats_apply_exact_rope(turned, -at), x) < 1e-3
    moved = rope_remap_positions(turned, at, at - 500)
    assert worst(moved, a2ats_apply_exact_rope(x, mx.arange(40))) < 1e-3


def test_products_know_distances_only() -> None:
    q, k = normal(20, 64), normal(20, 64, seed=1)
    i, j = mx.full((20,), 90), mx.arange(20)
    near = (a2ats_apply_exact_rope(q, i) * a2ats_apply_exact_rope(k, j)).sum(axis=-1)
    assert worst(near, (a2ats_apply_exact_rope(q, i - j) * k).sum(axis=-1)) < 1e-4 * 64


def test_far_rows_stay_and_the_query_takes_the_distance() -> None:
    x, at = normal(200, 32), mx.arange(200)
    turned = a2ats_apply_windowed_rope(x, at, 199, window=50)
    assert worst(turned[:150], x[:150]) == 0
    assert worst(turned[150:], a2ats_apply_exact_rope(x, at)[150:]) < 1e-6
    q = normal(3, 32, seed=2)
    far = a2ats_apply_far_query_rope(q, b=300)
    assert worst(far, a2ats_apply_exact_rope(q, mx.full((3,), 300))) < 1e-6


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    ],
    ids=["linear", "llama3", "yarn"],
)  # fmt: skip
def test_scaled_encodings_are_those_of_mlx_lm(scaling) -> None:
    from mlx_lm.models.rope_utils import initialize_rope

    stock, x = initialize_rope(64, 5e5, False, dict(scaling), 131072), normal(1, 1, 9, 64)
    want = stock(x, offset=3000)
    want = want * (mx.linalg.norm(x) / mx.linalg.norm(want))  # yarn also scales
    for code in (PositionCode.of(stock, 64, 1e4, None), PositionCode.of(None, 64, 5e5, scaling)):
        assert worst(code.turn(x, mx.arange(3000, 3009)), want) < 2e-3


def test_partial_and_traditional_encodings() -> None:
    from mlx import nn

    stock, x = nn.RoPE(32, traditional=True, scale=0.5), normal(1, 2, 9, 80)
    code = PositionCode.of(stock, 80, 1e4, None)
    assert worst(code.turn(x, mx.arange(5, 14)), stock(x, offset=5)) < 1e-4


def test_scaling_is_read_or_refused() -> None:
    assert rope_freqs_from_scaling(64, 1e4, None) is None
    assert rope_freqs_from_scaling(64, 1e4, {"rope_type": "default"}) is None
    with pytest.raises(QuantizerConfigError, match="'other'"):
        rope_freqs_from_scaling(64, 1e4, {"type": "other", "factor": 2})
    with pytest.raises(QuantizerConfigError, match="factor"):
        rope_freqs_from_scaling(64, 1e4, {"type": "linear"})


# ---- geometry -------------------------------------------------------------------------------


def skewed(seed: int = 3) -> mx.array:
    return normal(2000, 16, seed=seed) * mx.exp(-0.4 * mx.arange(16))


def test_the_factor_of_the_moment() -> None:
    h = a2ats_query_second_moment(skewed())
    low = a2ats_cholesky_factor(h)
    assert worst(low @ low.T, h) < 1e-4
    assert worst(mx.tril(low), low) == 0
    k, c = normal(20, 16), normal(20, 16, seed=1)
    away = mx.square((k - c) @ low).sum(axis=-1)
    assert worst(away, (((k - c) @ h) * (k - c)).sum(axis=-1)) < 1e-4 * 20
    with pytest.raises(ValueError, match="ridge"):
        a2ats_cholesky_factor(mx.zeros((4, 4)) - 1)
    assert worst(shrunk_moment(h, 0.0, 0.0), mx.diagonal(h).mean() * mx.eye(16)) < 1e-6
    assert worst(shrunk_moment(h, 1.0, 0.0), h) == 0


def test_weighted_codes_have_the_least_weighted_error() -> None:
    h = a2ats_query_second_moment(skewed())
    x, book = normal(300, 16, seed=4), normal(32, 16, seed=5)
    low = a2ats_cholesky_factor(h)

    def error(codes: mx.array) -> mx.array:
        left = x - mx.take(book, codes, axis=0)
        return ((left @ h) * left).sum(axis=-1)

    plain = a2ats_h_weighted_assignment(x, book, mx.eye(16))
    weighted = a2ats_h_weighted_assignment(x, book, low)
    assert weighted.dtype == mx.int32
    assert (error(weighted) <= error(plain) + 1e-4).all().item()
    assert (error(weighted).sum() < 0.9 * error(plain).sum()).item()
    away = mx.square(x[:, None] - book[None]).sum(axis=-1)
    assert mx.array_equal(plain, away.argmin(axis=-1).astype(mx.int32)).item()
    aware = a2ats_query_aware_assignment(x, book, skewed()[0], beta=0.0)
    assert mx.array_equal(aware, plain).item()
    ones = a2ats_query_aware_assignment(x, book, book[7], beta=1.0)
    assert set(ones.tolist()) == {7}


def test_a_weighted_codebook_serves_the_scores() -> None:
    queries, keys = skewed(6), normal(2000, 16, seed=7)
    moment = shrunk_moment(a2ats_query_second_moment(queries), 1.0)
    lost = []
    for h in (None, moment):
        basis = None if h is None else QueryWeighted(h)
        book = fit_retrieval_codebook(keys, 8, 5, h)
        codec = RetrievalCodec(16, RetrievalSpec(8, 5, False), VectorTable(np.array(book)), basis)
        packed = codec.encode(keys[None, None])
        scores = codec.scores(queries[None, None, :200], packed)[0, 0]
        lost.append(mx.square(scores - queries[:200] @ keys.T).mean().item())
    assert lost[1] < 0.95 * lost[0]


# ---- codes ----------------------------------------------------------------------------------


def fitted(dim: int = 64, tokens: int = 600) -> tuple[RetrievalCodec, mx.array, dict]:
    codec, x = RetrievalCodec(dim, RetrievalSpec(8, 6)), normal(2, 2, tokens, dim, seed=8)
    constants = codec.fit(x[:, :, : codec.spec.fit_tokens])
    return codec, x, {**codec.encode_fitted(x, constants), **constants}


@pytest.mark.parametrize("tokens", [100, 600])
def test_scores_are_those_of_the_decoded_keys(tokens: int) -> None:
    """Few tokens go through tables of products, many through unpacked rows."""
    codec, _, packed = fitted()
    packed = packed | {"w": packed["w"][:, :, :tokens]}
    rows, q = codec.decode(packed, mx.float32), normal(2, 2, 3, 64, seed=9)
    want = q @ rows.swapaxes(-1, -2)
    assert worst(codec.scores(q, packed), want) < 1e-3
    w = normal(2, 2, 3, tokens, seed=10)
    assert worst(codec.mix(w, packed), w @ rows) < 1e-3


def test_codes_are_one_by_one_and_sequences_apart() -> None:
    codec, x, packed = fitted()
    constants = {"book": packed["book"]}
    parts = [codec.encode_fitted(x[:, :, i : i + 50], constants)["w"] for i in range(0, 600, 50)]
    assert mx.array_equal(mx.concatenate(parts, axis=2), packed["w"]).item()
    alone = codec.fit(x[1:, :, : codec.spec.fit_tokens])["book"]
    assert mx.array_equal(alone, packed["book"][1:]).item()
    lost = mx.square(codec.decode(packed, mx.float32) - x).mean().item()
    assert lost < 0.75  # six bits for eight channels


@pytest.mark.parametrize(("trained", "least"), [(True, 0.9), (False, 0.85)])
def test_codes_find_the_best_tokens(trained: bool, least: float) -> None:
    """Keys of rank 16: the top fifth by codes against the true one."""
    basis = normal(16, 128, seed=11)
    keys = (normal(2048, 16, seed=12) @ basis)[None, None] / 4
    queries = (normal(8, 16, seed=13) @ basis)[None, None] / 4
    if trained:
        book = fit_retrieval_codebook(keys[0, 0], 8, 8)
        codec = RetrievalCodec(128, RetrievalSpec(8, 8, False), VectorTable(np.array(book)))
        packed = codec.encode(keys)
    else:
        codec = RetrievalCodec(128, RetrievalSpec(8, 8))
        constants = codec.fit(keys[:, :, : codec.spec.fit_tokens])
        packed = {**codec.encode_fitted(keys, constants), **constants}
    found, true, n = codec.scores(queries, packed), queries @ keys.swapaxes(-1, -2), 410
    top = [np.argsort(-np.array(s[0, 0]), axis=-1)[:, :n] for s in (found, true)]
    recall = np.mean([len(set(a) & set(b)) / n for a, b in zip(*top, strict=True)])
    assert recall >= least, recall


def test_the_retrieval_set_is_a_partition() -> None:
    keys, query = normal(101, 8), normal(8, seed=1)
    top, rest = a2ats_select_retrieval_set(keys, query, 0.2)
    assert len(top.tolist()) == math.ceil(0.2 * 101)
    assert sorted(top.tolist() + rest.tolist()) == list(range(101))
    cosine = keys @ query / mx.linalg.norm(keys, axis=1)
    assert cosine[top].min().item() >= cosine[rest].max().item()
    assert a2ats_select_retrieval_set(keys, query, 1.0)[1].size == 0
