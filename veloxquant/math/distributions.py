"""Densities that the scalar codebooks are fitted to."""

import math

import numpy as np


def gaussian_pdf(x: np.ndarray, sigma: float = 1.0) -> np.ndarray:
    """Density of N(0, σ²) at `x`."""
    return np.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))


def beta_pdf(x: np.ndarray, d: int) -> np.ndarray:
    """Density of one coordinate of a uniform point on the unit sphere in `d` dimensions.

    Zero outside (-1, 1). Source: TurboQuant (arXiv 2504.19874), lemma 1.
    """
    inside = np.abs(x) < 1
    base = np.where(inside, 1 - np.square(x), 1.0)
    log_scale = math.lgamma(d / 2) - math.lgamma((d - 1) / 2) - 0.5 * math.log(math.pi)
    return np.where(inside, np.exp(log_scale + (d - 3) / 2 * np.log(base)), 0.0)


def polar_angle_pdf(psi: np.ndarray, level: int) -> np.ndarray:
    """Density of the polar angle at `level`: uniform on [0, 2π) at 1, else on [0, π/2].

    Source: PolarQuant (arXiv 2502.02617).
    """
    if level == 1:
        return np.where((psi >= 0) & (psi < 2 * math.pi), 1 / (2 * math.pi), 0.0)
    half = 2 ** (level - 1)
    log_scale = math.lgamma(half) - (half - 2) * math.log(2) - 2 * math.lgamma(half / 2)
    inside = (psi >= 0) & (psi <= math.pi / 2)
    sine = np.clip(np.sin(2 * np.where(inside, psi, 0.0)), 1e-300, None)
    return np.where(inside, np.exp(log_scale + (half - 1) * np.log(sine)), 0.0)
