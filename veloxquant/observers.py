"""Observers of what caches and quantizers do: distortion, key norms, times, memory.

Producers call `notify` once an event; nothing is computed for an empty list of observers.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from veloxquant.core.abstractions import QuantizationObserver
from veloxquant.core.constants import LOWER_MSE_FACTOR

__path__ = []  # the documents have a package here: see veloxquant.documented

__path__ = []  # the documented submodules are names of this one
__all__ = [
    "DistortionObserver",
    "DistortionReport",
    "KeyNormObserver",
    "KeyNormReport",
    "LatencyObserver",
    "MemoryObserver",
    "QuantizationEvent",
    "QuantizationObserver",
    "notify",
]

_log = logging.getLogger(__name__)


@dataclass
class QuantizationEvent:
    """One event of a pipeline.

    Attributes:
        stage: what happened, such as "append_key", "append_value" or "attend".
        input_shape: shape of what came in.
        elapsed_ms: time it took, in milliseconds.
        memory_delta_bytes: growth of the bytes held.
        metadata: whatever the stage tells besides; observers read `x_original`,
            `x_reconstructed` and `key_l2_norm_sq`.
    """

    stage: str
    input_shape: tuple
    elapsed_ms: float = 0.0
    memory_delta_bytes: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


def notify(
    observers: Sequence[QuantizationObserver],
    stage: str,
    input_shape: tuple[int, ...],
    elapsed_ms: float = 0.0,
    memory_delta_bytes: int = 0,
    metadata: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Tell every observer about one event.

    An observer that fails is logged and does not stop the cache or the other observers: what is
    watched must not depend on who watches.

    Args:
        observers: those of the configuration; nothing happens for none.
        stage: what happened, see `QuantizationEvent`.
        input_shape: shape of what came in.
        elapsed_ms: time it took, in milliseconds.
        memory_delta_bytes: growth of the bytes held.
        metadata: what to tell besides, or a function that makes it: called only when somebody
            listens, so reconstructions cost nothing otherwise.
    """
    if not observers:
        return
    told = dict((metadata() if callable(metadata) else metadata) or {})
    event = QuantizationEvent(stage, tuple(input_shape), elapsed_ms, memory_delta_bytes, told)
    for observer in observers:
        try:
            observer.on_event(event)
        except Exception:  # foreign code at the edge of ours
            _log.exception(
                "observer %s failed on %s; the event is lost", type(observer).__name__, stage
            )


def _rows(x: Any) -> np.ndarray:
    """Vectors (n, d) in float64 from a numpy or MLX array of any float type."""
    if not isinstance(x, np.ndarray):
        import mlx.core as mx  # observers of numpy data need no MLX

        x = np.array(x.astype(mx.float32)) if isinstance(x, mx.array) else np.asarray(x)
    x = x.astype(np.float64)
    return x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)


@dataclass
class DistortionReport:
    """Summary of distortion, each value a mean over vectors.

    Attributes:
        empirical_mse: squared error over squared norm.
        theoretical_mse_upper: bound for TurboQuant at the observer's bits.
        theoretical_mse_lower: bound for any quantizer at these bits.
        mse_ratio: empirical over upper bound.
        empirical_ip_distortion: squared error of inner products with the observer's query, 0
            without a query.
        n_samples: vectors seen.
    """

    empirical_mse: float
    theoretical_mse_upper: float
    theoretical_mse_lower: float
    mse_ratio: float
    empirical_ip_distortion: float
    n_samples: int


class DistortionObserver(QuantizationObserver):
    """Mean distortion of vectors whose original and reconstruction come with an event.

    Errors are those of the direction (divided by the squared norm), to compare with bounds for
    unit vectors; zero vectors count with an error of 0 if they come back as zero, else 1.
    """

    def __init__(self, b: int = 2, d: int = 128, query: np.ndarray | None = None) -> None:
        self.b, self.d = b, d
        self.query = None if query is None else np.asarray(query, dtype=np.float64).reshape(-1)
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self._errors: list[float] = []
        self._mse_sum = self._ip_sum = 0.0
        self._count = 0

    def on_event(self, event: QuantizationEvent) -> None:
        """Add the vectors of an event that has both; others are ignored."""
        if not {"x_original", "x_reconstructed"} <= event.metadata.keys():
            return
        x, y = (_rows(event.metadata[name]) for name in ("x_original", "x_reconstructed"))
        if x.shape != y.shape:
            raise ValueError(f"x_original {x.shape} and x_reconstructed {y.shape} differ")
        if not len(x):
            return
        norm = np.square(x).sum(axis=-1)
        error = np.square(x - y).sum(axis=-1)
        mse = np.where(norm > 0, error / np.where(norm > 0, norm, 1), (error > 0).astype(float))
        self._mse_sum += float(mse.sum())
        if self.query is not None:
            self._ip_sum += float(np.square((x - y) @ self.query).sum())
        self._count += len(x)
        self._errors.append(float(mse.mean()))

    @staticmethod
    def theoretical_mse_upper(b: int) -> float:
        """TurboQuant's bound sqrt(3π)/2 · 4^-b for unit vectors."""
        return math.sqrt(3 * math.pi) / 2 * 4.0**-b

    @staticmethod
    def theoretical_mse_lower(b: int) -> float:
        """The bound 4^-b that no quantizer of unit vectors beats."""
        return LOWER_MSE_FACTOR * 4.0**-b

    @staticmethod
    def theoretical_ip_upper(b: int, d: int, y_norm_sq: float) -> float:
        """TurboQuant's bound on the squared error of inner products with a query y."""
        return math.sqrt(3) * math.pi**2 * y_norm_sq / d * 4.0**-b

    @staticmethod
    def theoretical_ip_lower(b: int, d: int, y_norm_sq: float) -> float:
        """The bound on that error which no quantizer beats."""
        return y_norm_sq / d * 4.0**-b

    def report(self) -> DistortionReport:
        """The summary so far."""
        n = max(self._count, 1)
        mse, upper = self._mse_sum / n, self.theoretical_mse_upper(self.b)
        return DistortionReport(
            mse, upper, self.theoretical_mse_lower(self.b), mse / upper, self._ip_sum / n,
            self._count,
        )  # fmt: skip

    def plot(self, save_path: str) -> None:
        """Draw the error of each event between the two bounds, as an SVG file.

        Raises:
            ValueError: when nothing was seen, or the name does not end in `.svg`.
        """
        if not self._errors:
            raise ValueError("nothing to draw: no event carried vectors yet")
        if Path(save_path).suffix.lower() != ".svg":
            raise ValueError(f"cannot draw {save_path!r}; give a name that ends in .svg")
        bounds = self.theoretical_mse_lower(self.b), self.theoretical_mse_upper(self.b)
        Path(save_path).write_text(_picture(self._errors, bounds), encoding="utf-8")


def _picture(errors: Sequence[float], bounds: tuple[float, float]) -> str:
    """A line of errors and two dashed bounds on a logarithmic scale."""
    width, height, edge = 640, 360, 40
    logs = [math.log10(max(e, 1e-12)) for e in (*errors, *bounds)]
    low, high = min(logs) - 0.1, max(logs) + 0.1

    def y(value: float) -> float:
        share = (math.log10(max(value, 1e-12)) - low) / (high - low)
        return height - edge - share * (height - 2 * edge)

    step = (width - 2 * edge) / max(len(errors) - 1, 1)
    points = " ".join(f"{edge + i * step:.1f},{y(e):.1f}" for i, e in enumerate(errors))
    lines = "".join(
        f'<line x1="{edge}" x2="{width - edge}" y1="{y(b):.1f}" y2="{y(b):.1f}" stroke="gray" '
        f'stroke-dasharray="6"/><text x="{edge}" y="{y(b) - 4:.1f}" font-size="12">{name} '
        f"{b:.3g}</text>"
        for name, b in zip(("lower bound", "upper bound"), bounds, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
        f'<rect width="100%" height="100%" fill="white"/>{lines}'
        f'<polyline points="{points}" fill="none" stroke="#0060c0" stroke-width="2"/></svg>\n'
    )


@dataclass
class KeyNormReport:
    """Statistics of squared key norms."""

    n_tokens: int
    mean_norm_sq: float
    min_norm_sq: float
    max_norm_sq: float

    @property
    def heterogeneity_ratio(self) -> float:
        """Largest over smallest, infinite when only the smallest is zero.

        Far above 1 it pays to give layers different bits; below about 2 the gain is small.
        """
        if self.min_norm_sq > 0:
            return self.max_norm_sq / self.min_norm_sq
        return math.inf if self.max_norm_sq > 0 else 1.0


class KeyNormObserver(QuantizationObserver):
    """Squared key norms, from `key_l2_norm_sq` in the metadata: a number or an array."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self._count, self._sum = 0, 0.0
        self._min, self._max = math.inf, 0.0

    def on_event(self, event: QuantizationEvent) -> None:
        """Add the norms of an event that carries them."""
        if (norms := event.metadata.get("key_l2_norm_sq")) is None:
            return
        values = _rows(norms).reshape(-1)
        if not len(values):
            return
        self._count += len(values)
        self._sum += float(values.sum())
        self._min = min(self._min, float(values.min()))
        self._max = max(self._max, float(values.max()))

    def report(self) -> KeyNormReport:
        """The statistics so far; zeros when no key was seen."""
        if not self._count:
            return KeyNormReport(0, 0.0, 0.0, 0.0)
        return KeyNormReport(self._count, self._sum / self._count, self._min, self._max)


class LatencyObserver(QuantizationObserver):
    """Times of each stage."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def reset(self) -> None:
        """Forget everything seen."""
        self._times.clear()

    def on_event(self, event: QuantizationEvent) -> None:
        """Add the time of an event."""
        self._times[event.stage].append(event.elapsed_ms)

    def report(self) -> dict[str, dict[str, float]]:
        """Of each stage `count`, and `total`, `mean`, `min`, `max`, `p50`, `p95` in ms."""
        out: dict[str, dict[str, float]] = {}
        for stage, times in self._times.items():
            values = np.asarray(times)
            middle, late = np.percentile(values, [50, 95])
            out[stage] = {
                "count": float(len(values)),
                "total": float(values.sum()),
                "mean": float(values.mean()),
                "min": float(values.min()),
                "max": float(values.max()),
                "p50": float(middle),
                "p95": float(late),
            }
        return out


class MemoryObserver(QuantizationObserver):
    """Growth of memory in each stage."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self._sums: dict[str, int] = defaultdict(int)
        self._peak = 0

    def on_event(self, event: QuantizationEvent) -> None:
        """Add the growth of an event."""
        self._sums[event.stage] += event.memory_delta_bytes
        self._peak = max(self._peak, event.memory_delta_bytes)

    def peak_delta_bytes(self) -> int:
        """Largest growth of one event, in bytes."""
        return self._peak

    def report(self) -> dict[str, int]:
        """Sum of the growth of each stage, in bytes."""
        return dict(self._sums)
