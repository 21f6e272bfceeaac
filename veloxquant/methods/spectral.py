"""spectral: codes in the eigenbasis of a head's keys and values, more bits for leading directions.

Directions are scaled to unit variance; the leading ones, widened to whole words of codes, have a
bit more and the last ones a bit less, wherever that lowers the expected error: a calibrated cache
takes the bytes of an uncalibrated one. With `spectral_apply_qjl` the leading directions of keys
give their additional bit to a sign sketch of their residual, which costs a second norm per key.
Without a calibration it is turboquant_mse. Eigenbases come from `vq precompute`, from rotations
saved under `spectral_model_name`, or from `SpectralQuantKVCache.calibrate`; they belong to the
model, and sequences share them.
Source: SpectralQuant, Vangara and Gopinath, 2026, Dynamis-Labs/spectralquant. Differs: one basis a
KV head, scales by direction instead of two, and bits that average `bit_width_inlier`. The authors'
own ablation is best without the sketch.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.layouts.base import everything
from veloxquant.cache.layouts.rotated import calibrated_spectral_specs, spectral_plan
from veloxquant.cache.plans import LayerPlan
from veloxquant.cache.standalone import StandaloneCache, layer_of, refuse_standalone_settings
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import CODEBOOK_BITS
from veloxquant.config.rotations import DEFAULT_NAME, rotations_file
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.spectral import segments
from veloxquant.quantizers.spectral import Eigenbasis, SpectralCodec, eigenbasis, pays
from veloxquant.spectral.calibrate import check_entry, load_cached_rotations

_log = logging.getLogger(__name__)
_told: set[str] = set()
FIT_FIELDS: tuple[str, ...] = ()
"""Eigenbases depend on the model alone."""
_ARRAYS = ("key_vectors", "key_variances", "value_vectors", "value_variances")
_KEPT = 256
Layout = tuple[LayerPlan, tuple[Any, Any]]
_layouts: OrderedDict[tuple, tuple[Mapping[str, Any], Layout]] = OrderedDict()
_files: dict[str, tuple[int, dict[int, tuple[tuple, Mapping[str, Any]]]]] = {}


class SpectralQuantKVCache(StandaloneCache):
    """One head in spectral, fed vector by vector."""

    def make_layer(self, config: KVCacheConfig, shape: LayerShape) -> ComposedCache:
        """Saved rotations of the first layer if there are any, else turboquant_mse."""
        return _layer(config, shape, _saved(config, shape, layer=0, n_layers=None))

    def calibrate(self, rotation_entry: tuple) -> None:
        """Use one entry of `calibrate_spectral_rotation`; `reset` keeps it.

        Raises:
            QuantizerConfigError: when it was made for another head size.
            CacheStateError: when tokens are held, whose codes would lose their meaning.
        """
        if len(self):
            raise CacheStateError(
                f"the cache holds {len(self)} tokens in another basis; reset() it first"
            )
        dim = self.config.head_dim
        check_entry(rotation_entry, (dim, dim))
        shape = LayerShape(1, 1, dim, dim)
        self.layer = _layer(self.config, shape, _arrays_of(rotation_entry))

    def compression_ratio(self) -> float:
        """16-bit bytes of the tokens held over bytes held; 1.0 while empty. The basis is apart."""
        return 4 * len(self) * self.config.head_dim / self.memory_bytes() if len(self) else 1.0


standalone = SpectralQuantKVCache


def fit(config: KVCacheConfig, sample: LayerSample) -> dict[str, np.ndarray]:
    """Eigenbases and variances of every KV head of one layer."""
    del config
    found = (*eigenbasis(sample.keys), *eigenbasis(sample.values))
    return dict(zip(_ARRAYS, found, strict=True))


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> ComposedCache:
    """The cache of one layer of a model."""
    refuse_standalone_settings(config)
    found = context.artifacts
    if not found:
        found = _saved(config, shape, context.layer, context.n_layers)
    return _layer(config, shape, found)


def _layer(
    config: KVCacheConfig, shape: LayerShape, found: Mapping[str, Any] | None
) -> ComposedCache:
    if not found:
        _tell(f"spectral has no calibration {config.spectral_model_name!r}: it is turboquant_mse")
        return layer_of(config, shape, spectral_plan(config))
    plan, codecs = _calibrated(config, shape, found)
    return ComposedCache(plan, shape, config.method, codecs)


def _calibrated(config: KVCacheConfig, shape: LayerShape, found: Mapping[str, Any]) -> Layout:
    """Plan and codecs of keys and values; sequences of one model share them."""
    settings = (
        config.bit_width_inlier, config.seed, config.spectral_key_d_eff,
        config.spectral_val_d_eff, config.spectral_apply_qjl,
    )  # fmt: skip
    key = (id(found), *settings, *shape)
    if key in _layouts:
        _layouts.move_to_end(key)
        return _layouts[key][1]
    bases = [
        Eigenbasis(mx.array(found[f"{side}_vectors"]), mx.array(found[f"{side}_variances"]))
        for side in ("key", "value")
    ]
    dims = (shape.k_dim, shape.v_dim)
    for basis, dim in zip(bases, dims, strict=True):
        heads = basis.vectors.shape[:-2]
        if basis.vectors.shape[-1] != dim or heads not in ((), (1,), (shape.n_kv_heads,)):
            raise QuantizerConfigError(
                f"an eigenbasis of shape {tuple(basis.vectors.shape)} does not fit "
                f"{shape.n_kv_heads} KV heads of {dim} channels; it was made for another model"
            )
    wanted = (config.spectral_key_d_eff, config.spectral_val_d_eff)
    leading = tuple(
        n if _worth(config, basis, dim, n) else 0
        for n, basis, dim in zip(wanted, bases, dims, strict=True)
    )
    keys, values = calibrated_spectral_specs(config, dims, (leading[0], leading[1]))
    plan = LayerPlan(everything(keys), everything(values))
    made: tuple[Any, Any] = (
        SpectralCodec(dims[0], keys, bases[0]),
        SpectralCodec(dims[1], values, bases[1]),
    )
    # The arrays are kept with it, so that their identity stays theirs.
    _layouts[key] = (found, (plan, made))
    while len(_layouts) > _KEPT:
        _layouts.popitem(last=False)
    return plan, made


def _worth(config: KVCacheConfig, basis: Eigenbasis, dim: int, leading: int) -> bool:
    """Whether more bits at the front lower the expected error of these variances."""
    bits = config.bit_width_inlier
    assert isinstance(bits, int)
    return pays(np.array(basis.variances), segments(dim, bits, leading, max(CODEBOOK_BITS)), bits)


def _saved(
    config: KVCacheConfig, shape: LayerShape, layer: int, n_layers: int | None
) -> Mapping[str, Any] | None:
    """Rotations kept under the configured name, for this layer; None without any that fit.

    Raises:
        QuantizerConfigError: when those of a name that was asked for are of another model.
    """
    name = config.spectral_model_name
    kept = _load(name)
    if not kept:
        return None
    try:
        if n_layers is not None and sorted(kept) != list(range(n_layers)):
            raise QuantizerConfigError(
                f"spectral_model_name={name!r} has rotations of {len(kept)} layers, the model has "
                f"{n_layers}; calibrate this model under a name of its own"
            )
        entry, arrays = kept[layer if layer in kept else min(kept)]
        check_entry(entry, (shape.k_dim, shape.v_dim))
    except QuantizerConfigError:
        if name != DEFAULT_NAME:
            raise
        _tell("rotations under the default name are of another model and are not used")
        return None
    return arrays


def _load(name: str) -> dict[int, tuple[tuple, Mapping[str, Any]]]:
    """Entries and their arrays by layer, read again when the file changes; empty without."""
    try:
        stamp = rotations_file(name).stat().st_mtime_ns
    except OSError:
        return {}
    if name not in _files or _files[name][0] != stamp:
        kept = load_cached_rotations(name) or {}
        _files[name] = (stamp, {n: (entry, _arrays_of(entry)) for n, entry in kept.items()})
    return _files[name][1]


def _arrays_of(entry: tuple) -> dict[str, Any]:
    """The arrays that `fit` names, from an entry that keys and values of all heads share."""
    return dict(zip(_ARRAYS, (entry[0], entry[2], entry[1], entry[3]), strict=True))


def _tell(what: str) -> None:
    """Log once."""
    if what not in _told:
        _told.add(what)
        _log.info("%s", what)
