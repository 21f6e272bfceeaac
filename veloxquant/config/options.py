"""Options of the methods, one dataclass a method, under their documented names.

`KVCacheConfig` inherits all of them, so each field and its default is written once, here.
Legal ranges are in `config/checks/`; meanings are in the method's own module.
"""

from dataclasses import dataclass
from typing import Any, Literal


class Unsaid(int):
    """A documented default that can be told from the same number when somebody gives that."""

    def __repr__(self) -> str:
        """As the number, since documents print it."""
        return int.__repr__(self)


@dataclass
class VecInferOptions:
    """Options of `vecinfer`; a field left at its default leaves the flat field alone.

    `residual_length` is kivi's too. Left alone, vecinfer keeps no exact window.
    """

    key_sub_dim: int = 4
    value_sub_dim: int = 8
    key_codebook_bits: int = 12
    value_codebook_bits: int = 8
    residual_length: int = Unsaid(128)


@dataclass
class KIVIOptions:
    """Options of `kivi`; a field left at its default leaves the flat field alone."""

    kivi_group_size: int = 32


@dataclass
class SVDqOptions:
    """Options of `svdq`; a field left at its default leaves the flat field alone."""

    svdq_rank: int | None = None
    svdq_energy_threshold: float = 0.95
    svdq_bit_schedule: tuple[int, ...] = (8, 4, 2, 1, 1, 0, 0, 0)
    svdq_group_size: int = 32


@dataclass
class KittyOptions:
    """Options of `kitty`; a field left at its default leaves the flat field alone."""

    kitty_hi_fraction: float = 0.25
    kitty_hi_bit: int = 4
    kitty_lo_bit: int = 2
    kitty_group_size: int = 32


@dataclass
class AdaKVOptions:
    """Options of `adakv`; a field left at its default leaves the flat field alone."""

    adakv_target_avg_bits: float = 2.5
    adakv_lo_bit: int = 2
    adakv_mid_bit: int = 3
    adakv_hi_bit: int = 4
    adakv_group_size: int = 32
    adakv_update_interval: int = 1
    adakv_importance: str = "norm_variance"
    adakv_obs_window: int = 32


@dataclass
class XQuantOptions:
    """Options of `xquant`; a field left at its default leaves the flat field alone."""

    xquant_group_size: int = 2
    xquant_base_bits: int = 2
    xquant_residual_bits: int = 4
    xquant_group_quant_size: int = 32
    xquant_max_ctx: int = 8192


@dataclass
class KVQuantOptions:
    """Options of `kvquant`; a field left at its default leaves the flat field alone."""

    kvquant_bits: int = 3
    kvquant_outlier_fraction: float = 0.01
    kvquant_group_size: int = 32
    kvquant_lloyd_iters: int = 8
    kvquant_refit_interval: int = 0
    kvquant_n_sink: int = 1


@dataclass
class PALUOptions:
    """Options of `palu`; a field left at its default leaves the flat field alone."""

    palu_rank: int | None = None
    palu_energy_threshold: float = 0.9
    palu_n_head_groups: int = 4
    palu_hi_bit: int = 4
    palu_lo_bit: int = 2
    palu_hi_fraction: float = 0.25
    palu_group_size: int = 32
    palu_quantize_values: bool = True


@dataclass
class CacheGenOptions:
    """Options of `cachegen`; a field left at its default leaves the flat field alone."""

    cachegen_bits: int = 4
    cachegen_group_size: int = 32
    cachegen_use_delta: bool = True
    cachegen_per_channel: bool = True
    cachegen_layer_groups: int = 3
    cachegen_resolved_bits: int | None = None


@dataclass
class MiniCacheOptions:
    """Options of `minicache`; a field left at its default leaves the flat field alone."""

    minicache_start_frac: float = 0.5
    minicache_group_size: int = 2
    minicache_retention_threshold: float = 0.9
    minicache_slerp_t: float = 0.5
    minicache_max_ctx: int = 8192


@dataclass
class GEAROptions:
    """Options of `gear`; a field left at its default leaves the flat field alone."""

    gear_bits: int = 2
    gear_rank: int | None = None
    gear_energy_threshold: float = 0.9
    gear_sparse_fraction: float = 0.01
    gear_group_size: int = 32
    gear_quantize_values: bool = True


@dataclass
class ZipCacheOptions:
    """Options of `zipcache`; a field left at its default leaves the flat field alone."""

    zipcache_hi_bits: int = 4
    zipcache_lo_bits: int = 2
    zipcache_hi_fraction: float = 0.2
    zipcache_group_size: int = 32
    zipcache_quantize_values: bool = True


@dataclass
class SnapKVOptions:
    """Options of `snapkv`; a field left at its default leaves the flat field alone."""

    snap_dtype: str = "auto"
    snap_batched_scoring: bool = True
    snap_backend: str = "auto"
    snap_budget: int = 512
    snap_obs_window: int = 32
    snap_n_sink: int = 4


@dataclass
class StreamingLLMOptions:
    """Options of `streaming_llm`; a field left at its default leaves the flat field alone."""

    stream_n_sink: int = 4
    stream_window_size: int = 512


@dataclass
class H2OOptions:
    """Options of `h2o`; a field left at its default leaves the flat field alone."""

    h2o_budget: int = 512
    h2o_n_sink: int = 4
    h2o_rope_base: float = 10000.0
    h2o_grace: int = 16
    h2o_decay: float = 0.98


@dataclass
class TOVAOptions:
    """Options of `tova`; a field left at its default leaves the flat field alone."""

    tova_budget: int = 512
    tova_n_sink: int = 4
    tova_backend: str = "auto"


@dataclass
class PyramidKVOptions:
    """Options of `pyramidkv`; a field left at its default leaves the flat field alone."""

    pyramid_budget: int = 512
    pyramid_backend: str = "reference"
    pyramid_n_sink: int = 4
    pyramid_beta: float = 2.0
    pyramid_resolved_budget: int | None = None


@dataclass
class SqueezeAttentionOptions:
    """Options of `squeeze`; a field left at its default leaves the flat field alone."""

    squeeze_budget: int = 512
    squeeze_n_sink: int = 4
    squeeze_strength: float = 1.0
    squeeze_resolved_budget: int | None = None


@dataclass
class ChunkKVOptions:
    """Options of `chunkkv`; a field left at its default leaves the flat field alone."""

    chunkkv_budget: int = 512
    chunkkv_chunk_size: int = 8
    chunkkv_n_sink: int = 4
    chunkkv_score: str = "attn_mass"
    chunkkv_reuse_layers: int = 1


@dataclass
class CaMOptions:
    """Options of `cam`; a field left at its default leaves the flat field alone."""

    cam_budget: int = 512
    cam_n_sink: int = 4
    cam_merge: str = "sim_weighted"
    cam_merge_keys: bool = False
    cam_merge_gate: bool = True


@dataclass
class XKVOptions:
    """Options of `xkv`; a field left at its default leaves the flat field alone."""

    xkv_group_size: int = 2
    xkv_rank: int | None = None
    xkv_energy_threshold: float = 0.95
    xkv_latent_bits: int = 4
    xkv_group_quant_size: int = 32
    xkv_max_ctx: int = 8192


@dataclass
class NSNQuantOptions:
    """Options of `nsnquant`; a field left at its default leaves the flat field alone."""

    nsn_bits: int = 2
    nsn_residual_length: int = 64
    nsn_codebook_size: int = 256
    nsn_subvector_dim: int = 8
    nsn_seed: int = 1234
    nsn_max_ctx: int = 8192


@dataclass
class L2NormOptions:
    """Options of `knorm`; a field left at its default leaves the flat field alone."""

    knorm_budget: int = 512
    knorm_n_sink: int = 4
    knorm_recent: int = 0
    knorm_keep: str = "low"


@dataclass
class SKVQOptions:
    """Options of `skvq`; a field left at its default leaves the flat field alone."""

    skvq_bits_key: int = 2
    skvq_bits_value: int = 2
    skvq_group_size: int = 32
    skvq_window: int = 128
    skvq_n_sink: int = 5
    skvq_reorder: bool = True
    skvq_clip_search: bool = True
    skvq_clip_alpha: float = 1.0
    skvq_max_ctx: int | None = None


@dataclass
class QFiltersOptions:
    """Options of `qfilters`; a field left at its default leaves the flat field alone."""

    qfilters_budget: int = 512
    qfilters_n_sink: int = 4
    qfilters_recent: int = 0
    qfilters_calib_tokens: int = 128
    qfilters_sign: int = 1
    qfilters_min_retention: float | None = 0.9
    qfilters_on_low_retention: Literal["warn", "raise", "ignore"] = "warn"


@dataclass
class KeyformerOptions:
    """Options of `keyformer`; a field left at its default leaves the flat field alone."""

    keyformer_budget: int = 512
    keyformer_n_sink: int = 4
    keyformer_recent: int = 0
    keyformer_tau: float | None = None
    keyformer_tau_init: float = 1.0
    keyformer_tau_end: float = 1.0
    keyformer_anneal_steps: int = 0
    keyformer_rope_base: float = 10000.0
    keyformer_seed: int = 0


@dataclass
class MorphKVOptions:
    """Options of `morphkv`; a field left at its default leaves the flat field alone."""

    morphkv_budget: int = 512
    morphkv_n_sink: int = 4
    morphkv_window: int = 8


@dataclass
class KVzipOptions:
    """Options of `kvzip`; a field left at its default leaves the flat field alone."""

    kvzip_budget: int = 512
    kvzip_n_sink: int = 4
    kvzip_probe: str = "context"
    kvzip_scope: Literal["head", "model"] = "head"


@dataclass
class KVTCOptions:
    """Options of `kvtc`; a field left at its default leaves the flat field alone."""

    kvtc_bit_budget: int = 512
    kvtc_bit_choices: tuple = (0, 1, 2, 3, 4, 6, 8)
    kvtc_beta: float = 3.5


@dataclass
class CurDKVOptions:
    """Options of `curdkv`; a field left at its default leaves the flat field alone."""

    curdkv_budget: int = 512
    curdkv_n_sink: int = 4
    curdkv_rank_cap: int = 16
    curdkv_rope_base: float = 10000.0


@dataclass
class NestedKVOptions:
    """Options of `nestedkv`; a field left at its default leaves the flat field alone."""

    nestedkv_budget: int = 512
    nestedkv_n_sink: int = 4
    nestedkv_window: int = 64
    nestedkv_beta: float = 3.0
    nestedkv_tau: float = 0.6
    nestedkv_kappa: float = 10.0
    nestedkv_safeguard_alpha: float = 0.2


@dataclass
class AMCOptions:
    """Options of `amc`; a field left at its default leaves the flat field alone."""

    amc_k_high: float = 0.2
    amc_k_mid: float = 0.3
    amc_use_query_saliency: bool = False
    amc_query_alpha: float = 0.5
    amc_adaptive_thresholds: bool = False
    amc_threshold_window: int = 64
    amc_gamma: float = 0.1
    amc_calib_variance: float | None = None
    amc_group_size: int = 32


@dataclass
class A2ATSOptions:
    """Options of `a2ats`; a field left at its default leaves the flat field alone."""

    a2ats_codebook_bits: int = 8
    a2ats_sub_dim: int = 8
    a2ats_window: int = 128
    a2ats_b: int = 2048
    a2ats_use_query_aware: bool = True
    a2ats_beta: float = 0.5
    a2ats_retrieval_fraction: float = 0.2
    a2ats_rope_base: float = 10000.0
    a2ats_rope_scaling: Any = None
    a2ats_query_h: Any = None
    a2ats_codebook: Any = None


@dataclass
class AnchorKVOptions:
    """Options of `anchorkv`; a field left at its default leaves the flat field alone."""

    anchorkv_theta: float = 0.05
    anchorkv_window: int = 32
    anchorkv_rho: float = 0.7
    anchorkv_anchor_frac: float = 1.0 / 128.0
    anchorkv_residual_bits: int = 2
    anchorkv_seed: int = 42


@dataclass
class RocketKVOptions:
    """Options of `rocketkv`; a field left at its default leaves the flat field alone."""

    rocketkv_compression_ratio: float = 8.0
    rocketkv_page_size: int | None = None
    rocketkv_head_topk1: int | None = None
    rocketkv_obs_window: int = 32
    rocketkv_n_sink: int = 4


@dataclass
class AgeTieredKVOptions:
    """Options of `age_tiered`; a field left at its default leaves the flat field alone."""

    age_recent_boundary: int = 128
    age_mid_boundary: int = 1024
    age_bits_recent: int = 8
    age_bits_mid: int = 4
    age_bits_old: int = 2
    age_group_size: int = 32


@dataclass
class SpectralQuantOptions:
    """Options of `spectral`; a field left at its default leaves the flat field alone."""

    spectral_key_d_eff: int = 4
    spectral_val_d_eff: int = 50
    spectral_apply_qjl: bool = True
    spectral_model_name: str = "model"
