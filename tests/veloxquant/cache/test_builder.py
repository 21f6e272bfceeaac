"""From a configuration to caches, of one layer and of a model."""

from typing import Any

import mlx.core as mx
import pytest
from cache_lab import READY, small_config
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from tests.architectures import tiny
from veloxquant.cache.builder import (
    KVCacheBuilder,
    KVCacheFactory,
    build_layer,
    new_caches,
    plan_model,
)
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layer import LayerCache
from veloxquant.cache.table import TABLE, MethodRow, row_of
from veloxquant.config.kv_cache import STANDALONE_METHODS, KVCacheConfig
from veloxquant.config.options import KIVIOptions, SnapKVOptions, StreamingLLMOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

SHAPE = LayerShape(4, 2, 64, 64, 4)


@pytest.mark.parametrize("row", READY, ids=lambda row: row.name)
def test_for_model_gives_caches_of_the_method_with_its_settings(row: MethodRow) -> None:
    caches = KVCacheBuilder.for_model(tiny("llama"), small_config(row))
    assert len(caches) == 2
    assert caches[0] is not caches[1]
    for cache in caches:
        assert cache.method == row.name
        assert cache.returns == "views"
        assert cache.offset == 0
        assert cache
        assert cache.nbytes == 0


def test_every_field_of_a_method_reaches_its_caches() -> None:
    def built(method: str, options: Any, **fields: Any) -> Any:
        config = KVCacheConfig(method=method, options=options, **fields)
        return KVCacheBuilder.for_model(tiny("llama"), config)[1]

    stream = built("streaming_llm", StreamingLLMOptions(stream_n_sink=2, stream_window_size=77))
    assert (stream.n_sink, stream.window) == (2, 77)
    assert stream.rope is tiny("llama").layers[1].self_attn.rope
    snap = built("snapkv", SnapKVOptions(snap_budget=99, snap_obs_window=7, snap_n_sink=3))
    policy = snap.policy
    assert (policy.budget, policy.n_recent, policy.n_sink) == (99, 7, 3)
    kivi = built("kivi", KIVIOptions(kivi_group_size=64), residual_length=128, bit_width_inlier=3)
    spec = kivi.plan.keys.spec
    assert (spec.bits, spec.group) == (3, 64)
    assert kivi.plan.keys.schedule.size == 128
    sink = built("kivi_sink", None, residual_length=32, n_sink_tokens=9)
    assert sink.n_sink_tokens == 9


def test_ropes_are_found_inside_lists_of_caches() -> None:
    model = tiny("falcon_h1")
    config = small_config(row_of("streaming_llm"))
    caches = new_caches(plan_model(model, config), config)
    assert [c.caches[1].rope for c in caches] == [layer.self_attn.rope for layer in model.layers]


def test_a_list_of_widths_is_one_a_compressed_layer() -> None:
    model = tiny("llama")
    config = KVCacheConfig(method="kivi", bit_width_inlier=[2, 8], residual_length=32)
    widths = [c.plan.keys.spec.bits for c in KVCacheBuilder.for_model(model, config)]
    assert widths == [2, 8]
    with pytest.raises(QuantizerConfigError, match="3 entries, the model 2"):
        plan_model(model, KVCacheConfig(method="kivi", bit_width_inlier=[2, 4, 8]))
    hybrid = KVCacheConfig(method="kivi", bit_width_inlier=[4], residual_length=32)
    assert KVCacheBuilder.for_model(tiny("lfm2"), hybrid)[1].plan.keys.spec.bits == 4


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3_next", [ArraysCache, ArraysCache, ArraysCache, LayerCache]),
        ("gemma3", [RotatingKVCache, RotatingKVCache, LayerCache]),
        ("deepseek_v3", [KVCache, KVCache]),
    ],
)
def test_entries_that_are_not_plain_attention_stay_the_models_own(
    name: str, kinds: list[type]
) -> None:
    caches = KVCacheBuilder.for_model(tiny(name), small_config(row_of("kivi")))
    assert all(isinstance(c, kind) for c, kind in zip(caches, kinds, strict=True))


def test_plans_are_reused_and_sequences_share_nothing() -> None:
    config = small_config(row_of("kivi"))
    plan = plan_model(tiny("llama"), config)
    first, second = new_caches(plan, config), new_caches(plan, config)
    tiny("llama")(mx.array([[5, 6, 7]]), cache=first)
    assert [c.offset for c in first] == [3, 3]
    assert [c.offset for c in second] == [0, 0]


def test_values_may_be_narrower_than_keys() -> None:
    for row in READY:
        for cache in KVCacheBuilder.for_model(tiny("deepseek_v2"), small_config(row)):
            keys, values = mx.ones((1, 4, 3, 64)), mx.ones((1, 4, 3, 32))
            got = cache.update_and_fetch(keys, values)
            assert [a.shape for a in got] == [keys.shape, values.shape]


def test_a_method_that_cannot_see_queries_says_so() -> None:
    plan = plan_model(tiny("gemma2"), small_config(row_of("kivi")))
    assert len(plan.warnings) == 1
    assert "its own caches" not in plan.warnings[0]
    none = plan_model(tiny("mamba2"), small_config(row_of("snapkv")))
    assert len(none.warnings) == 1
    assert "(a recurrent state of fixed size); its own caches are used" in none.warnings[0]


def test_unknown_and_planned_methods_are_refused_before_the_model_runs() -> None:
    class Untouchable:
        def __call__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the model ran")

    with pytest.raises(QuantizerConfigError, match="did you mean kivi"):
        plan_model(Untouchable(), KVCacheConfig(method="kivvi"))  # type: ignore[arg-type]
    planned = next((row for row in TABLE.values() if not row.is_ready), None)
    if planned is not None:
        with pytest.raises(QuantizerConfigError, match="not built yet; ready methods: fp16"):
            plan_model(Untouchable(), KVCacheConfig(method=planned.name))  # type: ignore[arg-type]
    with pytest.raises(QuantizerConfigError, match="bit_width_inlier=7"):
        plan_model(Untouchable(), KVCacheConfig(method="kivi", bit_width_inlier=7))


@pytest.mark.parametrize(
    "row", [r for r in READY if r.name not in STANDALONE_METHODS], ids=lambda row: row.name
)
def test_the_factory_gives_one_layer_that_returns_arrays(row: MethodRow) -> None:
    cache = KVCacheFactory.create(small_config(row, head_dim=64))
    keys, values = cache.update_and_fetch(mx.ones((1, 2, 3, 64)), mx.ones((1, 2, 3, 64)))
    assert isinstance(keys, mx.array)
    assert isinstance(values, mx.array)
    assert keys.shape == (1, 2, 3, 64)


def test_the_factory_refuses_what_belongs_to_a_model() -> None:
    with pytest.raises(QuantizerConfigError, match="for_model"):
        KVCacheFactory.create(KVCacheConfig(method="kivi", bit_width_inlier=[2, 4]))
    with pytest.raises(QuantizerConfigError, match="standalone methods only"):
        KVCacheFactory.create(KVCacheConfig(method="kivi", sliding_window=64))


def test_the_builder_collects_fields_and_checks_them_at_the_end() -> None:
    builder = KVCacheBuilder().with_method("turboquant_rvq").with_head_dim(64)
    cache = builder.with_bit_width(3).with_seed(7).build()
    assert cache.method == "turboquant_rvq"
    assert cache.assigned_bits == 3
    bad = KVCacheBuilder().with_method("kivi").with_bit_width(9)
    with pytest.raises(QuantizerConfigError, match="bit_width_inlier=9"):
        bad.build()
    with pytest.raises(QuantizerConfigError, match="jl_dim=64 has no effect"):
        KVCacheBuilder().with_method("kivi").with_jl_dim(64).build()


def test_a_layer_returns_views_when_its_context_says_so() -> None:
    config = small_config(row_of("kivi"))
    assert build_layer(config, SHAPE, LayerContext(views=True)).returns == "views"
    assert build_layer(config, SHAPE, LayerContext()).returns == "arrays"
    assert build_layer(config, SHAPE).returns == "arrays"
