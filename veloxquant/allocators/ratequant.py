"""Bits by layer from a fitted distortion curve: RateQuant.

A quantizer's error falls like `α·β^-bits`, and a layer counts by its sensitivity; the best bits are
a log-linear function of the sensitivities, here found exactly over the allowed widths. Bits
exclude scales and norms.
Source: RateQuant (arXiv 2605.06675). Differs: the paper allocates by head with a sensitivity of its
own; here a layer's weight is the mean squared norm of its keys.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.allocators.kvtc_dp import allocate_exactly
from veloxquant.math.lloyd_max import embedded_levels

_log = logging.getLogger(__name__)
_SPAN = 64.0
"""Weights stay within this factor of their geometric mean: first layers have huge keys."""

PROMPTS = (
    "In 1453 the walls of Constantinople fell after a siege of fifty-three days.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "A hash table finds an entry in constant time as long as few keys share a bucket.",
    "The steam engine moved work from the house to the factory within one generation.",
    "Heat flows from warm bodies to cold ones, and a part of it can be made to do work.",
    "A compiler reads a program, checks its types, and writes instructions for a machine.",
    "Trade along the Silk Road carried glass to the east and paper to the west.",
    "Vaccines show the immune system a harmless likeness, so that it knows the real thing.",
)
"""General text that `calibrate_layer_sensitivities` runs unless it is given its own."""


def allocate_bits_ratequant(
    sensitivities: Iterable[float],
    target_avg_bits: float,
    beta: float = 3.5,
    bit_choices: Sequence[int] = (1, 2, 3),
) -> list[int]:
    """Bits of each layer that minimise `Σ w·β^-bits` at a given mean.

    Args:
        sensitivities: weights w above 0, one a layer.
        target_avg_bits: mean bits, may be fractional; the sum is `round(target_avg_bits·N)`.
        beta: factor by which one bit divides the distortion; 3.5 for rotated codebooks, 5.0 for
            min/max groups.
        bit_choices: allowed bits, increasing. Where gaps make the sum unreachable, it is the
            nearest reachable one below.

    Returns:
        Bits in the order of the layers, fit for `KVCacheConfig.bit_width_inlier`.

    Raises:
        ValueError: for weights that are not above 0, a target outside the choices, beta of 1 or
            less, or choices that do not increase.
    """
    weights = np.asarray(list(sensitivities), dtype=np.float64)
    if weights.ndim != 1 or not np.isfinite(weights).all() or not (weights > 0).all():
        raise ValueError("sensitivities must be finite numbers above 0, one a layer")
    choices = tuple(bit_choices)
    if not choices or not min(choices) <= target_avg_bits <= max(choices):
        raise ValueError(
            f"target_avg_bits={target_avg_bits!r} is outside bit_choices={choices!r}; "
            f"choose a mean between the smallest and the largest"
        )
    if not len(weights):
        return []
    total = round(target_avg_bits * len(weights))
    return allocate_exactly(weights, total, choices, beta).tolist()


def fit_distortion_curve(
    head_dim: int,
    bit_choices: Sequence[int] = (1, 2, 3),
    seed: int = 0,
    n_samples: int = 64,
) -> tuple[float, float]:
    """Fit `D(b) = α·β^-b` to the rotated two-stage codebook on random unit vectors.

    Args:
        head_dim: channels of a vector.
        bit_choices: widths to measure, at least two of 1 to 6.
        seed: of the vectors.
        n_samples: number of vectors.

    Returns:
        (alpha, beta) of the least-squares line through `ln D`.

    Raises:
        ValueError: when there are fewer than two widths.
    """
    if len(set(bit_choices)) < 2:
        raise ValueError(f"bit_choices={tuple(bit_choices)!r} must hold at least two widths")
    # A rotation leaves the distribution of random directions alone, so none is applied.
    x = np.random.default_rng(seed).standard_normal((n_samples, head_dim))
    y = x / np.linalg.norm(x, axis=1, keepdims=True) * np.sqrt(head_dim)
    errors = []
    for bits in bit_choices:
        levels, cuts = embedded_levels(bits)
        hat = np.asarray(levels)[np.searchsorted(np.asarray(cuts), y)]
        best = (y * hat).sum(axis=1, keepdims=True) / np.square(hat).sum(axis=1, keepdims=True)
        errors.append(np.square(y - best * hat).sum(axis=1).mean() / head_dim)
    slope, intercept = np.polyfit(np.asarray(bit_choices, np.float64), np.log(errors), 1)
    return float(np.exp(intercept)), float(np.exp(-slope))


def calibrate_layer_sensitivities(
    model: Any,
    tokenizer: Any,
    prompts: list | None = None,
    seq_len: int = 256,
    verbose: bool = False,
) -> list[float]:
    """Key sensitivity of each attention layer: the mean squared norm of its keys.

    Every prompt gets caches of its own, and the model is not changed.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer, anything with `encode(text)`.
        prompts: texts to run, general ones by default.
        seq_len: most tokens of a prompt.
        verbose: report each prompt to the log at level INFO.

    Returns:
        One weight above 0 for each plain attention cache, in the model's order; outliers are
        drawn in to 64 times or a 64th of the geometric mean.

    Raises:
        ValueError: without prompts, tokens or attention layers.
    """
    texts = list(PROMPTS if prompts is None else prompts)
    sums: np.ndarray | None = None
    tokens = 0
    for i, text in enumerate(texts):
        ids = list(tokenizer.encode(text))[:seq_len]
        if not ids:
            continue
        caches, seen = _recording_caches(model)
        out = model(mx.array([ids]), cache=caches)
        mx.eval(out, [one.total for one in seen])
        squares = np.array([one.total.item() for one in seen]) * len(ids)
        sums = squares if sums is None else sums + squares
        tokens += len(ids)
        if verbose:
            _log.info("prompt %d of %d: %d tokens", i + 1, len(texts), len(ids))
    if sums is None or not len(sums):
        raise ValueError(
            "nothing to calibrate: give prompts with tokens and a model with attention"
        )
    weights = np.maximum(sums / tokens, np.finfo(np.float32).tiny)
    middle = np.exp(np.log(weights).mean())
    return np.clip(weights, middle / _SPAN, middle * _SPAN).tolist()


def _recording_caches(model: Any) -> tuple[list[Any], list[Any]]:
    """The model's own caches, plain ones made to note key norms, and a list of those."""
    # mlx_lm loads transformers: only when a model is there already
    from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

    class NormCache(KVCache):
        """A plain cache that keeps the mean squared norm of the keys it was given."""

        def __init__(self) -> None:
            super().__init__()
            self.total = mx.zeros(())

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            norms = mx.square(keys.astype(mx.float32)).sum(axis=-1)
            self.total = self.total + norms.mean()
            return super().update_and_fetch(keys, values)

    seen: list[NormCache] = []

    def replaced(entry: Any) -> Any:
        if isinstance(entry, CacheList):
            return CacheList(*(replaced(one) for one in entry.caches))
        if type(entry) is not KVCache:
            return entry
        seen.append(NormCache())
        return seen[-1]

    return [replaced(entry) for entry in make_prompt_cache(model)], seen
