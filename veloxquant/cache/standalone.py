"""Caches of one head that are fed vector by vector and compute their own attention.

They are the documented objects of the five standalone methods, and hold the same streams as the
caches that serve a model; only the way in and out differs. Every token is coded when it arrives,
the newest too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache.attend import attend, decode_range
from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.layouts.rotated import CALIBRATION_TOKENS
from veloxquant.cache.plans import TILE_TOKENS, LayerPlan
from veloxquant.cache.stream import Stream
from veloxquant.cache.table import row_of
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.abstractions import KVCache
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.observers import notify
from veloxquant.outlier import OutlierDetector
from veloxquant.quantizers.base import compute_dtype
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.channel_split import ChannelSplitSpec
from veloxquant.quantizers.stored import codec_with

ITEMSIZE = 2
_log = logging.getLogger(__name__)


class StandaloneCache(KVCache):
    """Keys and values of one head, (D,) in and (D,) out.

    How `attend` reads the codes is a choice of the configuration, the result is the same up to
    rounding: `enable_fused_query_dot` scores from the codes with a mapped query,
    `enable_vectorized_attend` unpacks whole tiles, and without both tokens are unpacked one by one.
    Several vectors (n, D) may be appended at once.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        row_of(config.method).check(config)
        if isinstance(config.bit_width_inlier, list):
            raise QuantizerConfigError(
                "bit_width_inlier is a list, which is one value a layer; "
                "build the caches of a model with KVCacheBuilder.for_model(model, config)"
            )
        self.config = config
        self.method = config.method
        dim = config.head_dim
        self.layer = self.make_layer(config, LayerShape(1, 1, dim, dim, ITEMSIZE))
        self._check_window()
        self._detector: OutlierDetector | None = None
        if config.n_outlier_channels and not config.enable_outlier_two_stream:
            first = config.n_calib_tokens or CALIBRATION_TOKENS
            self._detector = OutlierDetector(config.n_outlier_channels, first)
        elif config.bit_width_outlier and not config.n_outlier_channels:
            _log.info(
                "bit_width_outlier=%d waits for n_outlier_channels and enable_outlier_two_stream",
                config.bit_width_outlier,
            )

    def make_layer(self, config: KVCacheConfig, shape: LayerShape) -> ComposedCache:
        """The streams that hold the tokens."""
        raise NotImplementedError

    def _check_window(self) -> None:
        """A window must be able to hold the tokens that constants are fitted to."""
        window = self.config.sliding_window
        first = max(s.plan.spec.fit_tokens for s in self._streams())
        for name, limit in (("sliding_window", window), ("capacity", self.config.capacity)):
            if limit is not None and limit < first:
                raise QuantizerConfigError(
                    f"{name}={limit!r} is less than the {first} tokens that loud channels are "
                    f"found in; raise it or lower n_calib_tokens"
                )

    # ---- the documented interface -------------------------------------------------------

    def append_key(self, k: Any) -> None:
        """Code a key, shape (D,).

        Raises:
            ValueError: for another shape.
            CacheStateError: when `capacity` tokens are held.
        """
        self._append("append_key", k, self.layer.keys_stream)

    def append_value(self, v: Any) -> None:
        """Code a value, shape (D,).

        Raises:
            ValueError: for another shape.
            CacheStateError: when `capacity` tokens are held.
        """
        self._append("append_value", v, self.layer.values_stream)

    def attend(self, q: Any) -> mx.array:
        """Softmax attention of a query (D,) with every token held: (D,) in the query's type.

        Raises:
            ValueError: for another shape.
            CacheStateError: when the cache is empty, or a key has no value yet.
        """
        began = time.perf_counter()
        query = self._rows(q, "query", single=True)
        keys, values = self.layer.keys_stream, self.layer.values_stream
        if keys.length != values.length:
            raise CacheStateError(
                f"the cache holds {keys.length} keys and {values.length} values; append both "
                f"before attending"
            )
        if not keys.length:
            raise CacheStateError("the cache is empty; append a key and a value first")
        scale = self.config.head_dim**-0.5
        if self.config.enable_fused_query_dot:
            out = attend(
                query, keys.stores(), values.stores(), n_kv=1, v_dim=self.config.head_dim,
                scale=scale, mask=None, use_kernels=self.config.use_metal_kernels,
            )  # fmt: skip
        else:
            tile = TILE_TOKENS if self.config.enable_vectorized_attend else 1
            out = _attend_decoded(query, keys, values, scale, tile)
        out = out.reshape(-1).astype(self.config.dtype or query.dtype)
        if self.config.observers:
            mx.eval(out)
            elapsed = 1e3 * (time.perf_counter() - began)
            notify(self.config.observers, "attend", tuple(query.shape[-1:]), elapsed)
        return out

    def memory_bytes(self) -> int:
        """Bytes of the buffers held, growth steps included."""
        return self.layer.nbytes

    def reset(self) -> None:
        """Forget every token; rotations, tables, calibrations and loud channels stay."""
        for stream in self._streams():
            for store in stream.all_stores():
                store.clear(constants=False)

    def drop_oldest(self, n: int) -> None:
        """Forget the oldest `n` tokens, keys and values."""
        for stream in self._streams():
            _drop_front(stream, n)

    def __len__(self) -> int:
        """Tokens held, a key without its value yet included."""
        return max(stream.length for stream in self._streams())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method}, {len(self)} tokens, {self.memory_bytes()} B)"

    @property
    def outlier_channels(self) -> list[int] | None:
        """The loudest key channels, ascending; None before they are found, or without any.

        They are coded apart only with `enable_outlier_two_stream`.
        """
        if self._detector is not None:
            ready = self._detector.is_calibrated
            return self._detector.get_outlier_channels().tolist() if ready else None
        fitted = self.layer.keys_stream.body.fitted
        if "order" not in fitted:
            return None
        return (
            np.asarray(fitted["order"]).ravel()[-(self.config.n_outlier_channels or 0) :].tolist()
        )

    # ---- inside -------------------------------------------------------------------------

    def _streams(self) -> tuple[Stream, Stream]:
        return self.layer.keys_stream, self.layer.values_stream

    def _rows(self, x: Any, what: str, *, single: bool = False) -> mx.array:
        """(D,) or (n, D) as (1, 1, n, D)."""
        rows, dim = mx.array(x) if not isinstance(x, mx.array) else x, self.config.head_dim
        if rows.ndim not in ((1,) if single else (1, 2)) or rows.shape[-1] != dim:
            legal = f"({dim},)" if single else f"({dim},) or (n, {dim})"
            raise ValueError(f"a {what} has shape {tuple(rows.shape)}; it must be {legal}")
        if not mx.issubdtype(rows.dtype, mx.floating):
            rows = rows.astype(mx.float32)
        return rows.reshape(1, 1, -1, dim)

    def _append(self, stage: str, x: Any, stream: Stream) -> None:
        began, before = time.perf_counter(), self.memory_bytes() if self.config.observers else 0
        rows = self._rows(x, stage.removeprefix("append_"))
        if self.config.dtype is not None:
            rows = rows.astype(self.config.dtype)
        capacity, window = self.config.capacity, self.config.sliding_window
        # A window gives up old tokens before it is over the limit.
        kept = stream.length if window is None else min(stream.length, window - 1)
        if capacity is not None and kept + rows.shape[2] > capacity:
            raise CacheStateError(
                f"the cache holds {stream.length} tokens of capacity={capacity}; "
                f"reset() it, or build it with a larger capacity or with sliding_window"
            )
        if self._detector is not None and stage == "append_key":
            self._detector.observe(rows[0, 0])
        for piece in mx.split(rows, rows.shape[2], axis=2) if window else (rows,):
            stream.append(piece)
            if window is not None and stream.length > window:
                _drop_front(stream, stream.length - window)
        # One token after another would grow a graph that holds every buffer of the past.
        mx.eval(list(stream.arrays()))
        if self.config.observers:
            elapsed = 1e3 * (time.perf_counter() - began)
            grown = self.memory_bytes() - before
            told = _told(stage, rows, stream)
            shape = tuple(rows.shape[2:] if rows.shape[2] > 1 else rows.shape[3:])
            notify(self.config.observers, stage, shape, elapsed, grown, told)


def _told(stage: str, rows: mx.array, stream: Stream) -> Callable[[], dict[str, Any]]:
    """What observers read of appended rows: as they came, as they are held, squared norms."""

    def tell() -> dict[str, Any]:
        n = min(rows.shape[2], stream.length)
        true = rows[0, 0, -n:].astype(mx.float32)
        held = decode_range(stream.stores(), stream.length - n, stream.length, mx.float32)[0, 0]
        told = {"x_original": true, "x_reconstructed": held}
        if stage == "append_key":
            told["key_l2_norm_sq"] = mx.square(true).sum(axis=-1)
        return told

    return tell


def _drop_front(stream: Stream, n: int) -> None:
    """Forget the oldest tokens of a stream of codes that stand alone."""
    for store in stream.all_stores():
        gone = min(n, store.length)
        if gone:
            store.drop_front(gone)
            n -= gone


def _attend_decoded(
    query: mx.array, keys: Stream, values: Stream, scale: float, tile: int
) -> mx.array:
    """Scores from unpacked keys, then sums of unpacked values, `tile` tokens at a time."""
    work = compute_dtype(query.dtype)
    q, total = query.astype(work) * scale, keys.length
    spans = [(i, min(i + tile, total)) for i in range(0, total, tile)]
    scores = [q @ _unpacked(keys, span, work).swapaxes(-1, -2) for span in spans]
    weights = mx.softmax(mx.concatenate(scores, axis=-1).astype(mx.float32), axis=-1)
    out = mx.zeros((), dtype=work)
    for start, stop in spans:
        part = weights[..., start:stop].astype(work)
        out = out + part @ _unpacked(values, (start, stop), work)
    return out


def _unpacked(stream: Stream, span: tuple[int, int], dtype: mx.Dtype) -> mx.array:
    return decode_range(stream.stores(), *span, dtype)


def layer_of(config: KVCacheConfig, shape: LayerShape, plan: LayerPlan) -> ComposedCache:
    """The streams of a plan, with the rotations, tables and sketches of `config.store`.

    Raises:
        QuantizerConfigError: when loud channels would leave no others.
    """
    for spec, dim in ((plan.keys.spec, shape.k_dim), (plan.values.spec, shape.v_dim)):
        if isinstance(spec, ChannelSplitSpec) and spec.n_loud >= dim:
            raise QuantizerConfigError(
                f"n_outlier_channels={spec.n_loud!r} leaves none of the {dim} channels of a head; "
                f"lower it"
            )
    if config.store is None:
        return ComposedCache(plan, shape, config.method)
    keys = codec_with(config.store, plan.keys.spec, shape.k_dim)
    values = codec_with(config.store, plan.values.spec, shape.v_dim)
    return ComposedCache(plan, shape, config.method, (keys, values))


def refuse_standalone_settings(config: KVCacheConfig) -> None:
    """Raise for settings that only the vector-by-vector objects have.

    Raises:
        QuantizerConfigError: naming the field and its value.
    """
    is_set = {
        "enable_vectorized_attend": not config.enable_vectorized_attend,
        "enable_fused_query_dot": config.enable_fused_query_dot,
        "capacity": config.capacity is not None,
        "sliding_window": config.sliding_window is not None,
        "observers": bool(config.observers),
        "dtype": config.dtype is not None,
    }
    for field, given in is_set.items():
        if given:
            raise QuantizerConfigError(
                f"{field}={getattr(config, field)!r} has no effect on the caches of a model; it "
                f"belongs to the objects of KVCacheFactory.create. Leave it unset"
            )
    if not config.enable_outlier_two_stream:
        for field in ("bit_width_outlier", "n_outlier_channels", "n_calib_tokens"):
            if getattr(config, field):
                raise QuantizerConfigError(
                    f"{field}={getattr(config, field)!r} has no effect on method "
                    f"{config.method!r} without enable_outlier_two_stream=True; set that too"
                )
