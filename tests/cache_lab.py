"""What tests of caches share: configurations from the method table, feeding, and what is held."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from veloxquant.cache.batch import RowBatch
from veloxquant.cache.builder import build_layer
from veloxquant.cache.persist import _flatten
from veloxquant.cache.probe import LayerReport, ModelPlan
from veloxquant.cache.table import TABLE, MethodRow
from veloxquant.cache.view import CacheView
from veloxquant.config.common_fields import READERS
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import (
    A2ATSOptions,
    AgeTieredKVOptions,
    AnchorKVOptions,
    CacheGenOptions,
    CaMOptions,
    ChunkKVOptions,
    CurDKVOptions,
    H2OOptions,
    KeyformerOptions,
    KVzipOptions,
    L2NormOptions,
    MorphKVOptions,
    NestedKVOptions,
    PyramidKVOptions,
    QFiltersOptions,
    RocketKVOptions,
    SKVQOptions,
    SnapKVOptions,
    SqueezeAttentionOptions,
    StreamingLLMOptions,
    TOVAOptions,
)
from veloxquant.quantizers.sizes import LayerShape

READY = [row for row in TABLE.values() if row.is_ready]
NAMES = [row.name for row in READY]
KEEPING = [row for row in READY if row.trim != "until_evicted"]
EVICTING = [row for row in READY if row.trim == "until_evicted"]

SMALL_OPTIONS: dict[type, Any] = {
    StreamingLLMOptions: StreamingLLMOptions(stream_n_sink=4, stream_window_size=28),
    A2ATSOptions: A2ATSOptions(
        a2ats_codebook_bits=4, a2ats_window=16, a2ats_retrieval_fraction=1.0
    ),
    AnchorKVOptions: AnchorKVOptions(anchorkv_window=8),
    AgeTieredKVOptions: AgeTieredKVOptions(age_recent_boundary=32, age_mid_boundary=64),
    CaMOptions: CaMOptions(cam_budget=32),
    ChunkKVOptions: ChunkKVOptions(chunkkv_budget=60, chunkkv_chunk_size=4),
    CurDKVOptions: CurDKVOptions(curdkv_budget=32),
    H2OOptions: H2OOptions(h2o_budget=32, h2o_grace=8),
    KeyformerOptions: KeyformerOptions(keyformer_budget=32),
    KVzipOptions: KVzipOptions(kvzip_budget=32),
    L2NormOptions: L2NormOptions(knorm_budget=32),
    MorphKVOptions: MorphKVOptions(morphkv_budget=32, morphkv_window=4),
    QFiltersOptions: QFiltersOptions(qfilters_budget=32, qfilters_calib_tokens=16),
    RocketKVOptions: RocketKVOptions(rocketkv_obs_window=8, rocketkv_page_size=512),
    TOVAOptions: TOVAOptions(tova_budget=32),
    SnapKVOptions: SnapKVOptions(snap_budget=32, snap_obs_window=8, snap_n_sink=4),
    # Rows of unequal heads are not arrays that a reference could read; its own tests have those.
    NestedKVOptions: NestedKVOptions(nestedkv_budget=32, nestedkv_safeguard_alpha=1.0),
    PyramidKVOptions: PyramidKVOptions(pyramid_budget=40, pyramid_n_sink=2),
    SqueezeAttentionOptions: SqueezeAttentionOptions(squeeze_budget=32),
    SKVQOptions: SKVQOptions(skvq_window=24),
    CacheGenOptions: CacheGenOptions(cachegen_per_channel=False),
}
"""Budgets small enough that a short prompt goes over them; other options stay as documented."""


def small_config(row: MethodRow, **fields: Any) -> KVCacheConfig:
    """Windows and budgets of the row's options that a short sequence leaves behind."""
    options = SMALL_OPTIONS.get(row.options)
    if row.name in READERS["residual_length"] - {"vecinfer"}:
        fields.setdefault("residual_length", 32)
    return KVCacheConfig(method=row.name, options=options, **fields)


def roomy_config(row: MethodRow, **fields: Any) -> KVCacheConfig:
    """As documented: nothing is evicted from a sequence of a few hundred tokens."""
    return KVCacheConfig(method=row.name, **fields)


class Tokens(NamedTuple):
    """Queries (B, Hq, T, Dk), keys (B, H, T, Dk), values (B, H, T, Dv)."""

    queries: mx.array
    keys: mx.array
    values: mx.array

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def cut(self, start: int, stop: int) -> "Tokens":
        return Tokens(*(a[:, :, start:stop] for a in self))

    def row(self, i: int) -> "Tokens":
        return Tokens(*(a[i : i + 1] for a in self))

    def then(self, other: "Tokens") -> "Tokens":
        pairs = zip(self, other, strict=True)
        return Tokens(*(mx.concatenate([a, b], axis=2) for a, b in pairs))


def random_tokens(
    length: int,
    *,
    seed: int = 0,
    batch: int = 1,
    heads: int = 2,
    repeat: int = 2,
    k_dim: int = 64,
    v_dim: int | None = None,
    dtype: mx.Dtype = mx.float32,
    factor: float = 1.0,
) -> Tokens:
    """Normal tokens; the keys carry one strong channel, as real ones do."""
    draws = mx.random.split(mx.random.key(seed), 3)
    shape = (batch, heads, length)
    q = mx.random.normal((batch, heads * repeat, length, k_dim), key=draws[0])
    k = mx.random.normal((*shape, k_dim), key=draws[1])
    k = k * mx.where(mx.arange(k_dim) == 3, 8.0, 1.0)
    v = mx.random.normal((*shape, v_dim or k_dim), key=draws[2])
    out = Tokens(q.astype(dtype), (factor * k).astype(dtype), (factor * v).astype(dtype))
    mx.eval(*out)
    return out


def shape_of(tokens: Tokens) -> LayerShape:
    _, n_q, _, k_dim = tokens.queries.shape
    _, heads, _, v_dim = tokens.values.shape
    return LayerShape(n_q, heads, k_dim, v_dim, tokens.keys.dtype.size)


def new_cache(config: KVCacheConfig, shape: LayerShape, *, views: bool = True) -> Any:
    cache = build_layer(config, shape)
    cache.returns = "views" if views else "arrays"
    return cache


def attend(cache: Any, tokens: Tokens, sinks: mx.array | None = None) -> mx.array:
    """One call as a model makes it: mask, then rows, then attention through the hook."""
    q, k, v = tokens
    mask = cache.make_mask(q.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    scale = q.shape[-1] ** -0.5
    if isinstance(keys, CacheView):
        return keys.attend(q, values, scale, mask, sinks)
    return mx.fast.scaled_dot_product_attention(
        q, keys, values, scale=scale, mask=mask, sinks=sinks
    )


def pieces(length: int, size: int) -> list[tuple[int, int]]:
    return [(i, min(i + size, length)) for i in range(0, length, size)]


def feed(cache: Any, tokens: Tokens, size: int | None = None) -> mx.array:
    """Feed in pieces of `size` tokens; the outputs of all calls, (B, Hq, T, Dv)."""
    outs = []
    for start, stop in pieces(tokens.length, size or max(1, tokens.length)):
        out = attend(cache, tokens.cut(start, stop))
        mx.eval(out)
        outs.append(out)
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)


def state_parts(cache: Any) -> tuple[Any, dict[str, mx.array]]:
    """Committed state without growth steps: counters as a tree, arrays by path."""
    arrays: dict[str, mx.array] = {}
    tree = _flatten(cache.compact_state(), "state", arrays)
    mx.eval(list(arrays.values()))
    return tree, arrays


def same_state(a: Any, b: Any) -> None:
    """Assert bit-identical committed states."""
    tree_a, arrays_a = state_parts(a)
    tree_b, arrays_b = state_parts(b)
    assert tree_a == tree_b
    for path, left in arrays_a.items():
        right = arrays_b[path]
        assert left.dtype == right.dtype, path
        assert left.shape == right.shape, path
        assert mx.array_equal(left, right, equal_nan=True).item(), f"{path} differs"


def same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b).item())


def worst(a: mx.array, b: mx.array) -> float:
    """Largest absolute difference, in fp32."""
    return float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item())


def held_rows(cache: Any) -> tuple[mx.array, mx.array]:
    """Keys and values as the cache would hand them out, decoded."""
    before, cache.returns = cache.returns, "arrays"
    try:
        return cache.keys_and_values()
    finally:
        cache.returns = before


def plan_of(shape: LayerShape, layers: int) -> ModelPlan:
    """The plan of a model that is nothing but plain attention caches."""
    from mlx_lm.models.cache import KVCache

    class Model:
        def make_cache(self) -> list[Any]:
            return [KVCache() for _ in range(layers)]

    reports = [LayerReport((i,), "compressed", "full attention", shape) for i in range(layers)]
    return ModelPlan(Model(), reports, "views")


class Ragged:
    """Rows of unequal length in one `RowBatch`, padded on the right as mlx-lm pads prompts."""

    def __init__(
        self, config: KVCacheConfig, rows: Sequence[Tokens], *, views: bool = True
    ) -> None:
        self.rows = rows
        made = [new_cache(config, shape_of(t), views=views) for t in rows]
        self.batch: RowBatch = type(made[0]).merge(made)

    def prompt(self, size: int) -> list[mx.array]:
        """Feed the prompts in padded pieces; the real outputs of each row."""
        lengths = [t.length for t in self.rows]
        width = max(lengths)
        padded = [
            Tokens(*(mx.pad(a, [(0, 0), (0, 0), (0, width - t.length), (0, 0)]) for a in t))
            for t in self.rows
        ]
        whole = Tokens(
            *(mx.concatenate(list(parts), axis=0) for parts in zip(*padded, strict=True))
        )
        self.batch.prepare(lengths=lengths, right_padding=[width - n for n in lengths])
        out = feed(self.batch, whole, size)
        self.batch.finalize()
        return [out[i : i + 1, :, :n] for i, n in enumerate(lengths)]


# ---- tests of every row ---------------------------------------------------------------------

T = 150
every_row = pytest.mark.parametrize("row", READY, ids=NAMES)
keeping_rows = pytest.mark.parametrize("row", KEEPING, ids=[r.name for r in KEEPING])
evicting_rows = pytest.mark.parametrize("row", EVICTING, ids=[r.name for r in EVICTING])


def small(row: MethodRow, tokens: Tokens, **fields: Any) -> Any:
    return new_cache(small_config(row, **fields), shape_of(tokens))


def fed(row: MethodRow, tokens: Tokens, size: int | None = None) -> Any:
    cache = small(row, tokens)
    feed(cache, tokens, size)
    return cache


def counters(cache: Any) -> dict[str, Any]:
    """Documented counters: properties named for bytes or tokens."""
    names = [
        name
        for name in dir(type(cache))
        if isinstance(getattr(type(cache), name, None), property)
        and (name.endswith("_bytes") or name.startswith("tokens_"))
    ]
    return {name: getattr(cache, name) for name in names}


def before_checksums(metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata of a saved cache as files have it that were written before there were checksums."""
    head = json.loads(metadata["veloxquant_cache"])
    return {
        "veloxquant_cache": json.dumps(
            {k: v for k, v in head.items() if k not in ("minor", "crc32")}
        )
    }
