"""xquant, minicache and xkv: what layers lose and hold when they code tokens together."""

from typing import Any

import mlx.core as mx
import pytest
from cache_lab import Tokens, attend, held_rows, random_tokens, same, shape_of, worst
from mlx.nn import RoPE

from tests.architectures import tiny
from veloxquant.cache.builder import KVCacheBuilder, build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import LayerGroup
from veloxquant.cache.layouts.latent import mean_held, shares_of, xkv_plan, xquant_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import MiniCacheOptions, XKVOptions, XQuantOptions
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.merged import MergedCodec
from veloxquant.quantizers.shared_codes import least_squares
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.latent import LatentSpec
from veloxquant.quantizers.specs.shared import MergedSpec, SharedCodesSpec, SharedLatentsSpec

ONE_HEAD = LayerShape(1, 1, 128, 128)


def filled(options: Any, method: str, layers: list[Tokens], rope: Any = None) -> list[Any]:
    group = LayerGroup(len(layers))
    config = KVCacheConfig(method=method, options=options)
    caches = [
        build_layer(config, shape_of(t), LayerContext(group=group, views=True, rope=rope))
        for t in layers
    ]
    for start in range(0, layers[0].length, 128):
        for cache, tokens in zip(caches, layers, strict=True):
            mx.eval(attend(cache, tokens.cut(start, min(start + 128, tokens.length))))
    group.settle()
    return caches


def energy(x: mx.array) -> float:
    total: Any = mx.square(x).sum().item()
    return total


def lost(cache: Any, tokens: Tokens) -> float:
    pairs = list(zip(held_rows(cache), tokens[1:], strict=True))
    return sum(energy(a - b) for a, b in pairs) / sum(energy(b) for _, b in pairs)


def mapped(tokens: Tokens, factor: float, offset: float) -> Tokens:
    return tokens._replace(
        keys=factor * tokens.keys + offset, values=factor * tokens.values + offset
    )


# ---- xquant ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "offset"), [(1.0, 0.0), (2.5, 4.0), (-1.5, 1.0)])
def test_maps_of_the_first_layer_lose_no_more_than_it_does(factor: float, offset: float) -> None:
    tokens = random_tokens(160, seed=1)
    other = mapped(tokens, factor, offset)
    first, second = filled(XQuantOptions(xquant_residual_bits=0), "xquant", [tokens, other])
    for a, b, x, y in zip(held_rows(first), held_rows(second), tokens[1:], other[1:], strict=True):
        own, read = (energy(p - q) / p.size for p, q in ((a, x), (b, y)))
        assert read <= factor**2 * own * 1.001 + 1e-6


def test_least_squares_is_never_worse_than_ends_of_the_range() -> None:
    x, y = mx.random.normal((50, 32)), mx.random.normal((50, 32))
    codes = mx.round((x - x.min(-1, keepdims=True)) / (mx.max(x) - mx.min(x)) * 3)
    low = y.min(axis=-1, keepdims=True)
    ends = low + codes * (y.max(axis=-1, keepdims=True) - low) / 3
    factor, base = least_squares(y, codes)
    fitted, plain = (mx.square(a - y).sum(-1) for a in (factor * codes + base, ends))
    assert (fitted <= plain + 1e-4).all().item()
    factor, base = least_squares(y, mx.zeros_like(codes))
    assert not factor.any().item()
    assert mx.allclose(base, y.mean(axis=-1, keepdims=True)).item()


def test_residuals_never_hurt() -> None:
    layers = [random_tokens(160, seed=s) for s in (2, 3)]
    errors = [
        lost(filled(XQuantOptions(xquant_residual_bits=n), "xquant", layers)[1], layers[1])
        for n in (0, 1, 2, 4, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_a_layer_by_itself_is_coded_as_affine_groups() -> None:
    tokens = random_tokens(128, seed=4)
    cache = filled(XQuantOptions(xquant_group_size=1), "xquant", [tokens])[0]
    n = cache.keys_stream.body.length
    assert n == 96
    for spec, rows, got in (
        (AffineChannelSpec(2, 32), tokens.keys, held_rows(cache)[0]),
        (AffineTokenSpec(2, 32), tokens.values, held_rows(cache)[1]),
    ):
        codec = codec_for(spec, 64)
        assert same(got[:, :, :n], codec.decode(codec.encode(rows[:, :, :n]), mx.float32))
        assert same(got[:, :, n:], rows[:, :, n:])


@pytest.mark.parametrize(("residual", "wanted"), [(4, 1_179_648), (0, 524_288)])
def test_bytes_of_a_pair_are_those_of_the_layout(residual: int, wanted: int) -> None:
    specs = [
        SharedCodesSpec(kind(2, 32), residual, index=i, size=2)
        for kind in (AffineChannelSpec, AffineTokenSpec)
        for i in range(2)
    ]
    assert sum(s.nbytes(4096, 128, 2) for s in specs) == wanted


def test_counters_of_xquant() -> None:
    layers = [random_tokens(160, seed=s, dtype=mx.bfloat16) for s in (5, 6)]
    first, second = filled(None, "xquant", layers)
    assert (first.role, second.role) == ("anchor", "reuse")
    assert first.reuse_param_bytes == 0 < second.reuse_param_bytes
    assert first.effective_pair_bits == second.effective_pair_bits
    assert 4.5 < first.effective_pair_bits < 16


# ---- minicache ------------------------------------------------------------------------------


def test_layers_that_are_alike_lose_nothing() -> None:
    tokens = random_tokens(200, seed=7)
    caches = filled(None, "minicache", [tokens, tokens])
    for cache in caches:
        assert cache.keys_stream.body.length == 192
        assert lost(cache, tokens) < 1e-9
        assert cache.n_retained == 0
        assert cache.n_merged == 2 * 2 * 192


@pytest.mark.parametrize(("t", "layer"), [(0.0, 0), (1.0, 1)])
def test_the_ends_of_the_arc_are_the_layers(t: float, layer: int) -> None:
    layers = [random_tokens(200, seed=s) for s in (8, 9)]
    options = MiniCacheOptions(minicache_slerp_t=t, minicache_retention_threshold=-1.0)
    caches = filled(options, "minicache", layers)
    assert lost(caches[layer], layers[layer]) < 1e-6 < lost(caches[1 - layer], layers[1 - layer])


def test_lengths_and_angles_are_kept() -> None:
    layers = [random_tokens(200, seed=s) for s in (10, 11)]
    options = MiniCacheOptions(minicache_retention_threshold=-1.0, minicache_slerp_t=0.3)
    caches = filled(options, "minicache", layers)
    unit = [t.values / mx.linalg.norm(t.values, axis=-1, keepdims=True) for t in layers]
    between = mx.arccos((unit[0] * unit[1]).sum(-1))
    for cache, tokens, own, share in zip(caches, layers, unit, (0.3, 0.7), strict=True):
        got = held_rows(cache)[1]
        length = mx.linalg.norm(got, axis=-1)
        assert worst(length / mx.linalg.norm(tokens.values, axis=-1), mx.ones_like(length)) < 1e-3
        away = mx.arccos(mx.clip((got * own).sum(-1) / length, -1, 1))
        assert (away <= share * between + 1e-3).all().item()


def test_a_threshold_of_one_keeps_everything_and_errors_fall_with_it() -> None:
    first = random_tokens(200, seed=12)
    noise = random_tokens(200, seed=13)
    second = Tokens(*(a + 0.3 * b for a, b in zip(first, noise, strict=True)))
    errors = []
    for threshold in (-1.0, 0.9, 0.99, 1.0):
        options = MiniCacheOptions(minicache_retention_threshold=threshold)
        caches = filled(options, "minicache", [first, second])
        errors.append(sum(lost(c, t) for c, t in zip(caches, (first, second), strict=True)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_unlike_tokens_stay_as_they_are() -> None:
    first = random_tokens(200, seed=14)
    odd = (mx.arange(200) % 16 == 5)[None, None, :, None]
    other = random_tokens(200, seed=15)
    second = first._replace(
        keys=mx.where(odd, other.keys, first.keys), values=mx.where(odd, other.values, first.values)
    )
    caches = filled(None, "minicache", [first, second])
    for cache, tokens in zip(caches, (first, second), strict=True):
        for got, wanted in zip(held_rows(cache), tokens[1:], strict=True):
            assert worst(got, wanted) < 1e-4
    assert caches[0].n_retained == caches[1].n_retained == 2 * 2 * 12
    assert caches[0].retention_rate == pytest.approx(1 / 16)
    assert (caches[0].role, caches[1].role) == ("primary", "merge")


def test_strange_vectors_stay_finite() -> None:
    unit = mx.broadcast_to(mx.eye(64)[None, None, :1], (1, 1, 64, 64))
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        for other in (unit, -unit, 0 * unit, 60_000 * unit):
            rows = [a.astype(dtype) for a in (unit, other)]
            codecs = [MergedCodec(64, MergedSpec(0.9, 0.5, index=i, size=2)) for i in range(2)]
            first, second = codecs[0].encode_together(rows, [])
            for codec, own in zip(codecs, (first, second), strict=True):
                got = codec.decode({**first, **own}, dtype)
                assert mx.isfinite(got).all().item()
                assert got.dtype == dtype


def test_merging_turned_keys_is_turning_merged_ones() -> None:
    rope = RoPE(64)
    x, y = (random_tokens(64, seed=s).keys for s in (16, 17))
    codec = MergedCodec(64, MergedSpec(-1.0, 0.5, size=2))
    after = codec.decode(codec.encode_together([rope(x), rope(y)], [])[0], mx.float32)
    before = rope(codec.decode(codec.encode_together([x, y], [])[0], mx.float32))
    assert energy(after - before) < 1e-6 * energy(before)


# ---- xkv ------------------------------------------------------------------------------------


def test_all_latents_as_they_are_give_the_rows() -> None:
    layers = [random_tokens(576, seed=s) for s in (18, 19)]
    options = XKVOptions(xkv_rank=4096, xkv_latent_bits=16)
    for cache, tokens in zip(filled(options, "xkv", layers), layers, strict=True):
        assert cache.keys_stream.body.length == 576
        for got, wanted in zip(held_rows(cache), tokens[1:], strict=True):
            assert worst(got, wanted) < 2e-3


def test_more_joint_latents_never_lose_more() -> None:
    layers = [random_tokens(576, seed=s) for s in (20, 21)]
    errors = []
    for rank in (16, 48, 96, 128):
        options = XKVOptions(xkv_rank=rank, xkv_latent_bits=16)
        caches = filled(options, "xkv", layers)
        assert caches[0].rank == rank
        errors.append(sum(lost(c, t) for c, t in zip(caches, layers, strict=True)))
    assert errors == sorted(errors, reverse=True)


def test_layers_that_are_alike_need_the_rank_of_one() -> None:
    tokens = random_tokens(576, seed=22)
    loud = mapped(tokens, 50.0, 0.0)
    options = XKVOptions(xkv_rank=64, xkv_latent_bits=16)
    for cache, wanted in zip(filled(options, "xkv", [tokens, loud]), (tokens, loud), strict=True):
        assert lost(cache, wanted) < 1e-6


def test_directions_of_turned_keys_serve_later_positions() -> None:
    rope, draws = RoPE(64, base=500), mx.random.split(mx.random.key(23), 4)
    few = mx.random.normal((1, 1, 1_152, 12), key=draws[0])
    layers = []
    for i in (1, 2):
        rows = few @ mx.random.normal((1, 2, 12, 64), key=draws[i])
        layers.append(random_tokens(1_152, seed=i)._replace(keys=rope(rows)))
    errors = []
    for known in (rope, None):
        options = XKVOptions(xkv_rank=40, xkv_latent_bits=16)
        caches = filled(options, "xkv", layers, known)
        away = [held_rows(c)[0] - t.keys for c, t in zip(caches, layers, strict=True)]
        errors.append(sum(energy(a[:, :, 768:]) for a in away))
    assert errors[0] < errors[1]


def test_bytes_of_joint_latents_are_those_of_the_layout() -> None:
    latents = LatentSpec(512, 0.95, 4, 4, 1.0, 32)
    specs = [SharedLatentsSpec(latents, index=i, size=2) for i in range(2)]
    assert sum(s.nbytes(4096, 1024, 2) for s in specs) == 3_407_872 + 2 * 4
    plan = xkv_plan(KVCacheConfig(method="xkv", options=XKVOptions(xkv_max_ctx=600)), 0, 2)
    assert plan.keys.rows(2_000) == (0, 576, 1_424)


def test_counters_of_xkv() -> None:
    layers = [random_tokens(600, seed=s, dtype=mx.bfloat16) for s in (25, 26)]
    first, second = filled(None, "xkv", layers)
    assert (first.member_idx, second.member_idx) == (0, 1)
    assert first.shared_basis_bytes == second.shared_basis_bytes > 0
    assert second.compressed_key_bytes + second.compressed_value_bytes == second.shared_basis_bytes


# ---- models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["xquant", "minicache", "xkv"])
def test_a_model_of_layers_decodes_through_its_groups(method: str) -> None:
    model = tiny("llama")
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method))
    tokens = mx.arange(1, 41)[None]
    mx.eval(model(tokens, cache=caches))
    for _ in range(3):
        mx.eval(model(tokens[:, :1], cache=caches))
    assert {c.offset for c in caches} == {43}
    groups = {id(c.group): c.group for c in caches}
    assert sum(g.size for g in groups.values()) == len(caches)
    assert all(len(g.members) == g.size for g in groups.values())
    assert min(g.size for g in groups.values()) < 3


def test_what_a_layer_holds_on_average_is_between_its_parts() -> None:
    config = KVCacheConfig(method="xquant")
    mean = mean_held(shares_of(config, 4), ONE_HEAD, 4096).nbytes
    each = [xquant_plan(config, i, 2).held(ONE_HEAD, 4096).nbytes for i in range(2)]
    assert min(each) < mean < max(each)
    assert mean == sum(each) // 2
