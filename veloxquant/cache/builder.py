"""From a configuration to caches: one standalone layer, or every layer of a model."""

from __future__ import annotations

from typing import Any

from veloxquant.cache.calibration import artifacts_for
from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import LayerGroup, groups_for
from veloxquant.cache.layouts.kept_rows import storage_specs
from veloxquant.cache.probe import ModelPlan, native_caches, probe, replace_plain
from veloxquant.cache.residual import watch
from veloxquant.cache.residual_sites import all_show, sites_of
from veloxquant.cache.table import MethodRow, row_of
from veloxquant.config.kv_cache import STANDALONE_METHODS, KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

ITEMSIZE = 2


def build_layer(
    config: KVCacheConfig, shape: LayerShape, context: LayerContext | None = None
) -> Any:
    """The cache of one layer.

    Raises:
        QuantizerConfigError: for an unknown or planned method, or a setting out of range.
    """
    row = row_of(config.method)
    row.check(config)
    cache = row.load().build(config, shape, context or LayerContext(seed=config.seed))
    _apply_common(cache, config)
    if context is not None and context.views:
        cache.returns = "views"
    return cache


def _apply_common(cache: Any, config: KVCacheConfig) -> None:
    """Settings that every method takes alike."""
    cache.use_kernels = config.use_metal_kernels
    if (specs := storage_specs(config)) is not None:
        cache.hold_in(*specs)


class KVCacheFactory:
    """Creates the cache of one layer from a configuration."""

    @staticmethod
    def create(config: KVCacheConfig, context: LayerContext | None = None) -> Any:
        """A cache for one layer with `config.head_dim` channels; `context` is its place in a model.

        For the standalone methods it is one head that is fed vector by vector, see
        `cache.standalone`. For others it answers mlx-lm's cache protocol and returns arrays; caches
        for a whole model, with the attention hook, come from `KVCacheBuilder.for_model`.

        Raises:
            QuantizerConfigError: for an unknown or planned method, a setting out of range, a
                per-layer bit list, or a sliding window around a serving method.
        """
        row = row_of(config.method)
        if isinstance(config.bit_width_inlier, list):
            raise QuantizerConfigError(
                "bit_width_inlier is a list, which is one value a layer; "
                "build the caches of a model with KVCacheBuilder.for_model(model, config)"
            )
        if config.sliding_window is not None and row.name not in STANDALONE_METHODS:
            raise QuantizerConfigError(
                f"sliding_window={config.sliding_window!r} wraps standalone methods only "
                f"({', '.join(sorted(STANDALONE_METHODS))}); for {row.name!r} leave it unset, or "
                f"use method 'streaming_llm'"
            )
        if row.name in STANDALONE_METHODS:
            row.check(config)
            return row.load().standalone(config)
        shape = LayerShape(1, 1, config.head_dim, config.head_dim, ITEMSIZE)
        return build_layer(config, shape, context)


def plan_model(model: Any, config: KVCacheConfig) -> ModelPlan:
    """Attach the hook, probe the model, and check that the method can serve it.

    Raises:
        QuantizerConfigError: when it cannot, with the reason.
    """
    row = row_of(config.method)
    row.check(config)
    row.load()
    plan = probe(model)
    evicts = row.trim == "until_evicted"
    if evicts and plan.array_masks:
        raise QuantizerConfigError(
            f"method {row.name!r} gives up tokens, and this model builds one mask array for all "
            f"layers, which cannot describe that; choose a method that keeps every token"
        )
    if evicts and plan.window is not None:
        raise QuantizerConfigError(
            f"method {row.name!r} gives up tokens, and this model limits attention to a window of "
            f"{plan.window} tokens by position; choose a method that keeps every token"
        )
    bits = config.bit_width_inlier
    if isinstance(bits, list) and len(bits) != plan.compressed:
        raise QuantizerConfigError(
            f"bit_width_inlier has {len(bits)} entries, the model {plan.compressed} attention "
            f"layers that are compressed; give one entry a layer"
        )
    if plan.compressed == 0:
        reasons = "; ".join(dict.fromkeys(layer.reason for layer in plan.layers))
        plan.warnings.append(
            f"No layer of this model can be compressed ({reasons}); its own caches are used."
        )
    reads_stream = _reads_stream(row, config)
    if reads_stream and plan.compressed and not all_show(plan):
        plan.warnings.append(
            f"Method {row.name!r} measures how attention changes the residual stream, which the "
            f"layers of this model do not show; it uses what caches see (proxy)."
        )
    scores_by_queries = row.queries != "none" and not reads_stream
    if scores_by_queries and plan.returns == "arrays" and plan.compressed:
        plan.warnings.append(
            f"Method {row.name!r} scores with the model's queries, which cannot be seen here; it "
            f"uses a score of keys alone (proxy)."
        )
    plan.artifacts = artifacts_for(plan, config)
    return plan


def _reads_stream(row: MethodRow, config: KVCacheConfig) -> bool:
    reads = getattr(row.load(), "reads_stream", None)
    return reads is not None and reads(config)


def new_caches(plan: ModelPlan, config: KVCacheConfig) -> list[Any]:
    """Fresh caches for one sequence: ours where the probe said so, the model's own elsewhere."""
    row: MethodRow = row_of(config.method)
    module = row.load()
    layers = {layer.path: layer for layer in plan.layers if layer.kind == "compressed"}
    order = {path: i for i, path in enumerate(layers)}
    bits = config.bit_width_inlier
    split = getattr(module, "layer_groups", None)
    groups: list[LayerGroup | None] = [None] * len(layers)
    if split is not None:
        shapes, ropes = plan.shapes(), [plan.ropes.get(path) for path in layers]
        groups = [*groups_for(lambda n: split(config, n), shapes, ropes)]
    residual = None
    if layers and _reads_stream(row, config) and all_show(plan):
        residual = watch([*sites_of(plan).values()])

    def make(path: tuple[int, ...]) -> Any:
        layer = layers.get(path)
        if layer is None or layer.shape is None:
            return None
        index = order[path]
        own = config.with_fields(
            head_dim=layer.shape.k_dim,
            bit_width_inlier=bits[index] if isinstance(bits, list) else bits,
        )
        context = LayerContext(
            layer=index,
            n_layers=len(layers),
            seed=config.seed,
            rope=plan.ropes.get(path),
            views=plan.returns == "views",
            artifacts=plan.artifacts[index] if plan.artifacts else None,
            group=groups[index],
            residual=residual,
        )
        cache = module.build(own, layer.shape, context)
        cache.returns = plan.returns
        _apply_common(cache, config)
        cache.mask_axes = plan.mask_axes
        return cache

    return [replace_plain(c, (i,), make) for i, c in enumerate(native_caches(plan.model))]


class KVCacheBuilder:
    """Fluent builder of a configuration that ends in a cache.

    Every `with_` method returns the builder; values are checked by `build`.
    """

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}

    def _with(self, **fields: Any) -> KVCacheBuilder:
        self._fields.update(fields)
        return self

    def with_method(self, method: str) -> KVCacheBuilder:
        """Set the method, a name of the method table."""
        return self._with(method=method)

    def with_head_dim(self, d: int) -> KVCacheBuilder:
        """Set the attention head dimension."""
        return self._with(head_dim=d)

    def with_bit_width(self, inlier: int | list[int], outlier: int | None = None) -> KVCacheBuilder:
        """Set bits a coordinate; a list (one entry a layer) goes through `for_model` only."""
        return self._with(bit_width_inlier=inlier, bit_width_outlier=outlier)

    def with_jl_dim(self, m: int) -> KVCacheBuilder:
        """Set the dimension of the sign sketch."""
        return self._with(jl_dim=m)

    def with_n_outlier_channels(self, n: int) -> KVCacheBuilder:
        """Set the number of outlier channels to detect."""
        return self._with(n_outlier_channels=n)

    def with_n_calib_tokens(self, n: int) -> KVCacheBuilder:
        """Set how many tokens are seen before outlier channels are picked."""
        return self._with(n_calib_tokens=n)

    def with_vectorized_attend(self, enabled: bool = True) -> KVCacheBuilder:
        """Unpack keys in whole tiles rather than one by one."""
        return self._with(enable_vectorized_attend=enabled)

    def with_outlier_two_stream(self, enabled: bool = True) -> KVCacheBuilder:
        """Split outlier channels off after calibration."""
        return self._with(enable_outlier_two_stream=enabled)

    def with_fused_query_dot(self, enabled: bool = True) -> KVCacheBuilder:
        """Score from codes with a rotated query."""
        return self._with(enable_fused_query_dot=enabled)

    def with_seed(self, seed: int) -> KVCacheBuilder:
        """Set the random seed."""
        return self._with(seed=seed)

    def with_precision(self, dtype: Any) -> KVCacheBuilder:
        """Set the compute type."""
        return self._with(dtype=dtype)

    def with_capacity(self, max_tokens: int) -> KVCacheBuilder:
        """Set the most tokens that may be stored."""
        return self._with(capacity=max_tokens)

    def with_artifact_store(self, store: Any) -> KVCacheBuilder:
        """Load precomputed matrices and codebooks from a store."""
        return self._with(store=store)

    def with_observer(self, observer: Any) -> KVCacheBuilder:
        """Add an observer of quantization events."""
        return self._with(observers=[*self._fields.get("observers", []), observer])

    def with_sliding_window(self, window_size: int) -> KVCacheBuilder:
        """Keep only the newest tokens of a standalone method."""
        return self._with(sliding_window=window_size)

    def build(self) -> Any:
        """Check the configuration and build the cache of one layer.

        Raises:
            QuantizerConfigError: when any check fails.
        """
        return KVCacheFactory.create(KVCacheConfig(**self._fields))

    @staticmethod
    def for_model(model: Any, config: KVCacheConfig) -> list[Any]:
        """Fresh caches for one sequence of a loaded mlx-lm model, in the model's own order.

        Plain attention caches are replaced by caches of the method, sized by layer; sliding-window,
        recurrent, chunked and latent entries keep what the model gave. A list as
        `bit_width_inlier` gives one width a compressed layer. Attaches the attention hook.

        Raises:
            QuantizerConfigError: when the method cannot serve this model.
        """
        return new_caches(plan_model(model, config), config)
