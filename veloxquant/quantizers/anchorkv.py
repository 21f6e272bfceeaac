"""Anchors and residuals as functions on plain matrices, for analysis; caches use `anchored.py`."""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant.math.lloyd_max import embedded_levels
from veloxquant.quantizers.anchored import nearest, project
from veloxquant.quantizers.rotation import rotation
from veloxquant.quantizers.saliency import rank

RESIDUAL_BITS = 2
PARAM_BYTES = 2
"""Bytes of a scale, a factor or an anchor's number."""
_TINY = 1e-30


class AnchorAssignment(NamedTuple):
    """Anchors, the nearest one of each row, the factor on it and what it leaves over."""

    anchor_positions: Any
    assign_idx: Any
    gamma: Any
    residual: Any


class ResidualCodec:
    """Rotated residuals in 2^bits levels, scaled so that the largest coordinate is met.

    Raises:
        ValueError: when there are no bits, or more than 4.
    """

    def __init__(self, head_dim: int, seed: int, bits: int = RESIDUAL_BITS) -> None:
        if not 1 <= bits <= 4:
            raise ValueError(f"bits={bits} is not possible; bits must be 1, 2, 3 or 4")
        self.head_dim, self.bits = head_dim, bits
        self._rotation = rotation(head_dim, seed)
        levels, thresholds = embedded_levels(bits)
        top = levels[-1]
        self._levels = mx.array([level / top for level in levels], dtype=mx.float32)
        self._cuts = [cut / top for cut in thresholds]

    @property
    def bytes_per_residual(self) -> int:
        """Packed codes and a 16-bit scale."""
        return -(-self.head_dim * self.bits // 8) + PARAM_BYTES

    def encode(self, residual: mx.array) -> tuple[mx.array, mx.array]:
        """Codes uint8 (..., D) and scales fp16 (..., 1) of residuals (..., D)."""
        turned = self._rotation.rotate(residual.astype(mx.float32))
        scale = mx.abs(turned).max(axis=-1, keepdims=True)
        unit = turned / mx.maximum(scale, _TINY)
        codes = mx.zeros(unit.shape, dtype=mx.uint8)
        for cut in self._cuts:
            codes = codes + (unit > cut)
        # The scale with the least squared error for these codes.
        hat = mx.take(self._levels, codes.astype(mx.uint32))
        best = (turned * hat).sum(axis=-1, keepdims=True)
        best = best / mx.maximum(mx.square(hat).sum(axis=-1, keepdims=True), _TINY)
        return codes, best.astype(mx.float16)

    def decode(self, codes: mx.array, scale: mx.array) -> mx.array:
        """Residuals fp32 from codes and scales."""
        hat = mx.take(self._levels, codes.astype(mx.uint32)) * scale.astype(mx.float32)
        return self._rotation.unrotate(hat)


def select_anchors(scoring_keys: mx.array, k: int, window: int, rho: float, seed: int) -> mx.array:
    """Positions (int32, ascending) of min(k, S) anchors among keys (S, D).

    The newest `window` tokens come first; of the other places a share `rho` goes to the tokens with
    the most attention by the newest keys, the rest is drawn at random.
    """
    return select_anchors_batched(scoring_keys[None], k, window, rho, seed)[0]


def select_anchors_batched(
    scoring_keys: mx.array, k: int, window: int, rho: float, seed: int
) -> mx.array:
    """As `select_anchors` for (BH, S, D): (BH, min(k, S)) int32."""
    groups, total, dim = scoring_keys.shape
    k = min(k, total)
    recent = min(window, k)
    by_mass = round(rho * (k - recent))
    keys = scoring_keys.astype(mx.float32)
    last = keys[:, max(0, total - max(window, 1)) :]
    weights = mx.softmax(last @ keys.swapaxes(-1, -2) * dim**-0.5, axis=-1)
    draws = np.random.default_rng(seed).random((groups, total)).astype(np.float32)
    at = mx.arange(total)
    newest = at >= total - recent
    heavy = rank(mx.where(newest, -1.0, weights.mean(axis=1))) < by_mass
    taken = newest | heavy
    order = rank(mx.where(taken, 2.0, mx.array(draws)))
    chosen = mx.where(order < k, at, total)
    return mx.sort(chosen, axis=-1)[:, :k].astype(mx.int32)


def assign_and_project(x: mx.array, anchor_positions: mx.array) -> AnchorAssignment:
    """The nearest anchor of each row (S, D), by |cosine|, with factor and residual in fp32."""
    out = assign_and_project_batched(x[None], anchor_positions[None])
    return AnchorAssignment(anchor_positions, *(part[0] for part in out[1:]))


def assign_and_project_batched(x: mx.array, anchor_positions: mx.array) -> AnchorAssignment:
    """As `assign_and_project` for (BH, S, D) and positions (BH, k)."""
    rows = x.astype(mx.float32)[None]
    at = anchor_positions[None, ..., None].astype(mx.uint32)
    anchors = mx.take_along_axis(rows, at, axis=2)
    ids = nearest(rows, anchors)
    own = mx.arange(x.shape[1])[:, None] == anchor_positions[:, None, :]
    ids = mx.where(own.any(axis=-1), mx.argmax(own, axis=-1), ids[0])[None]
    gamma, residual = project(rows, anchors, ids)
    return AnchorAssignment(
        anchor_positions, ids[0].astype(mx.int32), gamma[0].squeeze(-1), residual[0]
    )


def pack_codes(codes: np.ndarray, bits: int = RESIDUAL_BITS) -> np.ndarray:
    """Codes (n, D) below 2^bits as bytes (n, ceil(D·bits/8)), most significant bit first."""
    codes = np.asarray(codes, dtype=np.uint8)
    planes = (codes[..., None] >> np.arange(bits - 1, -1, -1, dtype=np.uint8)) & 1
    return np.packbits(planes.reshape(*codes.shape[:-1], -1), axis=-1)


def unpack_codes(packed: np.ndarray, d: int, bits: int = RESIDUAL_BITS) -> np.ndarray:
    """Inverse of `pack_codes` for D = `d`: uint8 (n, d)."""
    planes = np.unpackbits(packed, axis=-1, count=d * bits)
    wide = planes.reshape(*packed.shape[:-1], d, bits)
    return (wide << np.arange(bits - 1, -1, -1, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def key_value_utility(
    proxy_queries: mx.array,
    keys: mx.array,
    values: mx.array,
    key_residual: mx.array,
    value_residual: mx.array,
) -> tuple[mx.array, mx.array]:
    """What coding the residual of each token is worth, for keys (S,) and for values (S,).

    Keys: mean attention of the queries times the root mean square error of the scores, times the
    length of the value that a wrong weight misplaces. Values: mean attention times the length of
    the residual.

    Args:
        proxy_queries: (m, D).
        keys: (S, D).
        values: (S, D).
        key_residual: (S, D).
        value_residual: (S, D).
    """
    groups = (proxy_queries, keys, values, key_residual, value_residual)
    u_key, u_value = key_value_utility_batched(*(a[None] for a in groups))
    return u_key[0], u_value[0]


def key_value_utility_batched(
    proxy_queries: mx.array,
    keys: mx.array,
    values: mx.array,
    key_residual: mx.array,
    value_residual: mx.array,
) -> tuple[mx.array, mx.array]:
    """As `key_value_utility` for (BH, ...)."""
    q, k, v, rk, rv = (
        a.astype(mx.float32) for a in (proxy_queries, keys, values, key_residual, value_residual)
    )
    q = q * q.shape[-1] ** -0.5
    mass = mx.softmax(q @ k.swapaxes(-1, -2), axis=-1).mean(axis=1)
    error = mx.sqrt(mx.square(q @ rk.swapaxes(-1, -2)).mean(axis=1))
    return mass * error * mx.linalg.norm(v, axis=-1), mass * mx.linalg.norm(rv, axis=-1)


def allocate_residual_budget(utilities: list[mx.array], n_slots: int) -> list[mx.array]:
    """Masks of the `n_slots` tokens that are worth most over all heads, one bool mask a head."""
    sizes = [u.shape[0] for u in utilities]
    if not sizes:
        return []
    flat = mx.concatenate([u.astype(mx.float32) for u in utilities])
    order = mx.argsort(mx.argsort(-flat))
    edges = np.cumsum(sizes)[:-1].tolist()
    return list(mx.split(order < n_slots, edges))


def anchorkv_budget_slots(
    seq_len: int, head_dim: int, n_anchor: int, theta: float, residual_codec_bytes: int
) -> int:
    """Residuals that fit into the share `theta` of the uncompressed bytes of one head.

    Anchors are exact keys and values; every other token has a number and two factors.
    """
    budget = theta * seq_len * head_dim * 2 * 2
    anchors = n_anchor * head_dim * 2 * 2
    numbers = (seq_len - n_anchor) * 3 * PARAM_BYTES
    return max(0, int((budget - anchors - numbers) // max(1, residual_codec_bytes)))
