"""The configuration: documented fields and defaults, options, warnings, refusals."""

import ast
import copy
import dataclasses
import inspect
import math
import warnings
from typing import Any

import mlx.core as mx
import pytest

from veloxquant.cache.builder import KVCacheBuilder, KVCacheFactory
from veloxquant.cache.table import TABLE, row_of
from veloxquant.config import options as all_options
from veloxquant.config.kv_cache import (
    FIELD_OWNER,
    METHOD_NAMES,
    SHARED_FIELDS,
    STANDALONE_METHODS,
    KVCacheConfig,
    defaults,
)
from veloxquant.config.options import KIVIOptions, SnapKVOptions, VecInferOptions
from veloxquant.config.validate import check
from veloxquant.core.exceptions import QuantizerConfigError

DOCUMENTED = """
    method='turboquant_rvq', head_dim=128, bit_width_inlier=2, bit_width_outlier=None,
    jl_dim=None, n_outlier_channels=None, n_calib_tokens=None, enable_vectorized_attend=True,
    enable_outlier_two_stream=False, enable_fused_query_dot=False, seed=42, dtype=None,
    capacity=None, sliding_window=None, store=None, observers=<factory>, options=None,
    key_sub_dim=4, value_sub_dim=8, key_codebook_bits=12, value_codebook_bits=8,
    residual_length=128, kivi_group_size=32, svdq_rank=None, svdq_energy_threshold=0.95,
    svdq_bit_schedule=(8, 4, 2, 1, 1, 0, 0, 0), svdq_group_size=32, kitty_hi_fraction=0.25,
    kitty_hi_bit=4, kitty_lo_bit=2, kitty_group_size=32, adakv_target_avg_bits=2.5,
    adakv_lo_bit=2, adakv_mid_bit=3, adakv_hi_bit=4, adakv_group_size=32, adakv_update_interval=1,
    adakv_importance='norm_variance', adakv_obs_window=32, xquant_group_size=2,
    xquant_base_bits=2, xquant_residual_bits=4, xquant_group_quant_size=32, xquant_max_ctx=8192,
    kvquant_bits=3, kvquant_outlier_fraction=0.01, kvquant_group_size=32, kvquant_lloyd_iters=8,
    kvquant_refit_interval=0, kvquant_n_sink=1, palu_rank=None, palu_energy_threshold=0.9,
    palu_n_head_groups=4, palu_hi_bit=4, palu_lo_bit=2, palu_hi_fraction=0.25, palu_group_size=32,
    palu_quantize_values=True, cachegen_bits=4, cachegen_group_size=32, cachegen_use_delta=True,
    cachegen_per_channel=True, cachegen_layer_groups=3, cachegen_resolved_bits=None,
    minicache_start_frac=0.5, minicache_group_size=2, minicache_retention_threshold=0.9,
    minicache_slerp_t=0.5, minicache_max_ctx=8192, gear_bits=2, gear_rank=None,
    gear_energy_threshold=0.9, gear_sparse_fraction=0.01, gear_group_size=32,
    gear_quantize_values=True, zipcache_hi_bits=4, zipcache_lo_bits=2, zipcache_hi_fraction=0.2,
    zipcache_group_size=32, zipcache_quantize_values=True, snap_dtype='auto',
    snap_batched_scoring=True, snap_backend='auto', snap_budget=512, snap_obs_window=32,
    snap_n_sink=4, stream_n_sink=4, stream_window_size=512, h2o_budget=512, h2o_n_sink=4,
    h2o_rope_base=10000.0, h2o_grace=16, h2o_decay=0.98, tova_budget=512, tova_n_sink=4,
    tova_backend='auto', pyramid_budget=512, pyramid_backend='reference', pyramid_n_sink=4,
    pyramid_beta=2.0, pyramid_resolved_budget=None, squeeze_budget=512, squeeze_n_sink=4,
    squeeze_strength=1.0, squeeze_resolved_budget=None, chunkkv_budget=512, chunkkv_chunk_size=8,
    chunkkv_n_sink=4, chunkkv_score='attn_mass', chunkkv_reuse_layers=1, cam_budget=512,
    cam_n_sink=4, cam_merge='sim_weighted', cam_merge_keys=False, cam_merge_gate=True,
    xkv_group_size=2, xkv_rank=None, xkv_energy_threshold=0.95, xkv_latent_bits=4,
    xkv_group_quant_size=32, xkv_max_ctx=8192, nsn_bits=2, nsn_residual_length=64,
    nsn_codebook_size=256, nsn_subvector_dim=8, nsn_seed=1234, nsn_max_ctx=8192, knorm_budget=512,
    knorm_n_sink=4, knorm_recent=0, knorm_keep='low', skvq_bits_key=2, skvq_bits_value=2,
    skvq_group_size=32, skvq_window=128, skvq_n_sink=5, skvq_reorder=True, skvq_clip_search=True,
    skvq_clip_alpha=1.0, skvq_max_ctx=None, qfilters_budget=512, qfilters_n_sink=4,
    qfilters_recent=0, qfilters_calib_tokens=128, qfilters_sign=1, qfilters_min_retention=0.9,
    qfilters_on_low_retention='warn', keyformer_budget=512, keyformer_n_sink=4,
    keyformer_recent=0, keyformer_tau=None, keyformer_tau_init=1.0, keyformer_tau_end=1.0,
    keyformer_anneal_steps=0, keyformer_rope_base=10000.0, keyformer_seed=0, morphkv_budget=512,
    morphkv_n_sink=4, morphkv_window=8, kvzip_budget=512, kvzip_n_sink=4, kvzip_probe='context',
    kvtc_bit_budget=512, kvtc_bit_choices=(0, 1, 2, 3, 4, 6, 8), kvtc_beta=3.5, curdkv_budget=512,
    curdkv_n_sink=4, curdkv_rank_cap=16, curdkv_rope_base=10000.0, nestedkv_budget=512,
    nestedkv_n_sink=4, nestedkv_window=64, nestedkv_beta=3.0, nestedkv_tau=0.6,
    nestedkv_kappa=10.0, nestedkv_safeguard_alpha=0.2, amc_k_high=0.2, amc_k_mid=0.3,
    amc_use_query_saliency=False, amc_query_alpha=0.5, amc_adaptive_thresholds=False,
    amc_threshold_window=64, amc_gamma=0.1, amc_calib_variance=None, amc_group_size=32,
    a2ats_codebook_bits=8, a2ats_sub_dim=8, a2ats_window=128, a2ats_b=2048,
    a2ats_use_query_aware=True, a2ats_beta=0.5, a2ats_retrieval_fraction=0.2,
    a2ats_rope_base=10000.0, a2ats_rope_scaling=None, a2ats_query_h=None, a2ats_codebook=None,
    anchorkv_theta=0.05, anchorkv_window=32, anchorkv_rho=0.7, anchorkv_anchor_frac=0.0078125,
    anchorkv_residual_bits=2, anchorkv_seed=42, rocketkv_compression_ratio=8.0,
    rocketkv_page_size=None, rocketkv_head_topk1=None, rocketkv_obs_window=32, rocketkv_n_sink=4,
    age_recent_boundary=128, age_mid_boundary=1024, age_bits_recent=8, age_bits_mid=4,
    age_bits_old=2, age_group_size=32, n_sink_tokens=5, smooth_factors=None, key_codebook=None,
    value_codebook=None, spectral_key_d_eff=4, spectral_val_d_eff=50, spectral_apply_qjl=True,
    spectral_model_name='model', use_metal_kernels=None, fused_sdpa=False,
    fused_sdpa_max_ctx=None, fused_sdpa_memory_bound=False
"""

CLASSES = [
    cls
    for cls in vars(all_options).values()
    if inspect.isclass(cls) and dataclasses.is_dataclass(cls)
]


def documented() -> dict[str, str]:
    """Field names and defaults as the documents print them."""
    call = ast.parse(f"f({DOCUMENTED.replace('<factory>', '[]')})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(k.arg): repr(ast.literal_eval(k.value)) for k in call.keywords}


OURS = ("kvzip_scope", "eviction_storage")
"""Fields that the documents do not have; among them in the order of the others."""


def test_fields_and_defaults_are_the_documented_ones_in_order() -> None:
    wanted = documented()
    assert len(wanted) == 225
    fields = {f.name: f for f in dataclasses.fields(KVCacheConfig)}
    assert [name for name in fields if name not in OURS] == list(wanted)
    assert [name for name in fields if name in OURS] == list(OURS)
    made = KVCacheConfig()
    assert {name: repr(getattr(made, name)) for name in wanted} == wanted


def test_lists_are_not_shared_among_configurations() -> None:
    one = KVCacheConfig()
    one.observers.append(1)
    assert KVCacheConfig().observers == []


def test_there_are_43_methods_and_five_of_them_stand_alone() -> None:
    assert len(METHOD_NAMES) == len(set(METHOD_NAMES)) == 43
    assert len(STANDALONE_METHODS) == 5
    assert set(METHOD_NAMES) >= STANDALONE_METHODS


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_option_is_a_field_with_the_same_default(cls: type) -> None:
    made = KVCacheConfig()
    for field in dataclasses.fields(cls):
        assert getattr(made, field.name) == getattr(cls(), field.name)
        assert FIELD_OWNER[field.name] == cls.__name__ or field.name in SHARED_FIELDS


def other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "other"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_options_fill_fields_and_explicit_arguments_win(cls: type) -> None:
    names = [f.name for f in dataclasses.fields(cls) if f.name not in SHARED_FIELDS]
    given = {name: other_value(getattr(cls(), name)) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = KVCacheConfig(options=cls(**given))
    assert {name: getattr(config, name) for name in names} == given
    first = names[0]
    explicit = "mine" if not isinstance(given[first], int) else given[first] + 5
    with pytest.warns(DeprecationWarning, match=f"options={cls.__name__}"):
        config = KVCacheConfig(options=cls(**given), **{first: explicit})
    assert getattr(config, first) == explicit


def test_a_flat_method_field_warns_once_with_its_replacement() -> None:
    with pytest.warns(DeprecationWarning, match="snap_budget=64") as caught:
        KVCacheConfig(method="snapkv", snap_budget=64)
    assert len(caught) == 1
    assert "options=SnapKVOptions(snap_budget=...)" in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KVCacheConfig(method="kivi", residual_length=64, n_sink_tokens=3)
        KVCacheConfig(method="snapkv", options=SnapKVOptions(snap_budget=64))


def test_an_unknown_field_is_named_with_the_nearest_one() -> None:
    with pytest.raises(QuantizerConfigError, match="did you mean residual_length"):
        KVCacheConfig(method="kivi", residual_lenght=64)  # type: ignore[call-arg]
    with pytest.raises(QuantizerConfigError, match=r"no field 'xyzzy'; help\(KV"):
        KVCacheConfig(xyzzy=1)  # type: ignore[call-arg]
    assert list(inspect.signature(KVCacheConfig).parameters)[:2] == ["method", "head_dim"]


def test_copies_with_other_fields() -> None:
    config = KVCacheConfig(method="kivi")
    other = config.with_fields(head_dim=64, bit_width_inlier=4)
    assert (other.head_dim, other.bit_width_inlier, other.method) == (64, 4, "kivi")
    assert config.head_dim == 128
    with pytest.raises(AttributeError, match="no field 'banana'"):
        config.with_fields(banana=1)
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (KVCacheConfig(method="kiwi"), "unknown method 'kiwi'"),
        (KVCacheConfig(method="kivi", options=SnapKVOptions()), "takes KIVIOptions"),
        (KVCacheConfig(method="snapkv", options=KIVIOptions()), "takes SnapKVOptions"),
        (KVCacheConfig(method="kivi", capacity=0), "capacity=0"),
        (KVCacheConfig(method="kivi", residual_length=100), "a multiple of kivi_group_size=32"),
        (KVCacheConfig(method="kivi", observers=[print]), "no effect"),
        (KVCacheConfig(method="kivi", bit_width_inlier=[]), "one integer a layer"),
        (KVCacheConfig(method="kivi", bit_width_inlier=[2, 7]), "bit_width_inlier=7"),
        (
            KVCacheConfig(method="snapkv", options=SnapKVOptions(snap_budget=36)),
            "more than snap_n_sink + snap_obs_window = 36",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusals_name_what_is_wrong(config: KVCacheConfig, told: str) -> None:
    with pytest.raises(QuantizerConfigError) as caught:
        check(config, {"kivi": KIVIOptions, "snapkv": SnapKVOptions}.get(config.method))
    assert told in str(caught.value)


def test_a_field_of_another_method_is_refused() -> None:
    config = KVCacheConfig(method="kivi", options=KIVIOptions()).with_fields(key_sub_dim=8)
    with pytest.raises(QuantizerConfigError, match="option of VecInferOptions"):
        check(config, KIVIOptions)
    assert VecInferOptions().residual_length == KVCacheConfig().residual_length


def test_the_factory_builds_single_layers_only() -> None:
    with pytest.raises(QuantizerConfigError, match="for_model"):
        KVCacheFactory.create(KVCacheConfig(bit_width_inlier=[2, 3]))
    with pytest.raises(QuantizerConfigError, match="streaming_llm"):
        KVCacheFactory.create(KVCacheConfig(sliding_window=64))
    with pytest.raises(QuantizerConfigError, match="did you mean"):
        KVCacheFactory.create(KVCacheConfig(method="kivy"))
    with pytest.raises(QuantizerConfigError, match="not built yet; ready methods: fp16"):
        dataclasses.replace(row_of("kivi"), status="planned").load()


def test_the_builder_gathers_fields() -> None:
    cache = (KVCacheBuilder().with_method("kivi").with_head_dim(64).with_bit_width(4)).build()
    assert cache.method == "kivi"
    assert cache.plan.keys.spec.bits == 4
    with pytest.raises(QuantizerConfigError, match="seed=7 has no effect on method 'kivi'"):
        KVCacheBuilder().with_method("kivi").with_seed(7).build()
    with pytest.raises(QuantizerConfigError, match="n_outlier_channels=3 has no effect"):
        KVCacheBuilder().with_n_outlier_channels(3).build()


@pytest.mark.parametrize(
    ("method", "field"),
    [
        ("kvquant", "kvquant_n_sink"),
        ("skvq", "skvq_n_sink"),
        ("kivi_sink", "n_sink_tokens"),
        ("streaming_llm", "stream_n_sink"),
    ],
)
def test_sinks_whose_buffer_would_be_huge_are_refused(method: str, field: str) -> None:
    config = KVCacheConfig(method=method).with_fields(**{field: 10**9})
    with pytest.raises(QuantizerConfigError, match=f"{field}=1000000000.*at most 4096"):
        row_of(method).check(config)


@pytest.mark.parametrize("wrong", [{"snap_budget": 64}, 5, SnapKVOptions])
def test_options_that_are_no_options_are_refused(wrong: Any) -> None:
    with pytest.raises(QuantizerConfigError, match="options must be an object of a method's"):
        KVCacheConfig(method="snapkv", options=wrong)


@pytest.mark.parametrize("wrong", [0, 1, "yes"])
def test_use_metal_kernels_is_true_or_false(wrong: Any) -> None:
    with pytest.raises(QuantizerConfigError, match="use_metal_kernels"):
        row_of("kivi").check(KVCacheConfig(method="kivi", use_metal_kernels=wrong))


METHOD_OPTIONS = [
    (row.name, f.name)
    for row in TABLE.values()
    if row.options
    for f in dataclasses.fields(row.options)
]


@pytest.mark.parametrize(("method", "field"), METHOD_OPTIONS, ids="-".join)
def test_a_value_of_another_type_is_refused_by_name(method: str, field: str) -> None:
    usual = defaults()[field]
    bad: list[Any] = ["blue", object(), math.nan, -1.5]
    if isinstance(usual, int) and not isinstance(usual, bool):
        bad += [float(usual), True]
    if isinstance(usual, bool | float):
        bad += [2j, "1"]
    for value in bad:
        config = KVCacheConfig(method=method, head_dim=64).with_fields(**{field: value})
        with pytest.raises(QuantizerConfigError, match=f"{field}="):
            TABLE[method].check(config)


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("turboquant_mse", "dtype", "float32"), ("turboquant_mse", "dtype", mx.int32),
        ("qjl", "dtype", "mlx.core.float32"), ("polar", "observers", "blue"),
        ("polar", "observers", [1]), ("spectral", "observers", 7.0),
        ("vecinfer", "smooth_factors", "blue"), ("vecinfer", "key_codebook", object()),
        ("vecinfer", "value_codebook", 7.0),
    ],
)  # fmt: skip
def test_objects_of_another_kind_are_refused_by_name(method: str, field: str, value: Any) -> None:
    config = KVCacheConfig(method=method, head_dim=64).with_fields(**{field: value})
    with pytest.raises(QuantizerConfigError, match=f"{field}=.* is not possible"):
        TABLE[method].check(config)
    for right in (mx.float16, mx.bfloat16, mx.float32):
        TABLE["polar"].check(KVCacheConfig(method="polar", head_dim=64, dtype=right))
