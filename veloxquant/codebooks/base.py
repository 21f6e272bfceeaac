"""The factory of scalar codebooks; tables are computed once a process."""

from functools import lru_cache
from typing import Literal

from veloxquant.codebooks.scalar_codebook import ScalarCodebook
from veloxquant.codebooks.strategies import (
    LloydMaxBetaStrategy,
    LloydMaxGaussianStrategy,
    PolarAngleSamplingStrategy,
    UniformStrategy,
)
from veloxquant.core.abstractions import CodebookStrategy
from veloxquant.core.exceptions import QuantizerConfigError


class CodebookFactory:
    """Creates scalar codebooks by distribution."""

    @staticmethod
    def create(
        distribution: Literal["gaussian", "beta", "polar_level", "uniform"],
        b: int,
        d: int,
        polar_level: int = 1,
    ) -> ScalarCodebook:
        """The shared codebook of 2^b levels.

        Args:
            distribution: "gaussian" N(0, 1/d), "beta" (a coordinate on the unit sphere in d
                dimensions), "polar_level" (the angle at `polar_level`), or "uniform" on [-1, 1].
            b: bits, 1 to 8.
            d: length of the vectors.
            polar_level: level of the polar recursion, from 1; the others ignore it.

        Raises:
            QuantizerConfigError: for an unknown distribution or a value out of range.
        """
        return _create(distribution, b, d, polar_level if distribution == "polar_level" else 1)


@lru_cache(maxsize=256)
def _create(distribution: str, b: int, d: int, polar_level: int) -> ScalarCodebook:
    strategy: CodebookStrategy
    if distribution == "gaussian":
        strategy = LloydMaxGaussianStrategy()
    elif distribution == "beta":
        strategy = LloydMaxBetaStrategy()
    elif distribution == "polar_level":
        strategy = PolarAngleSamplingStrategy(polar_level)
    elif distribution == "uniform":
        strategy = UniformStrategy()
    else:
        raise QuantizerConfigError(
            f"distribution {distribution!r}; known: gaussian, beta, polar_level, uniform"
        )
    return ScalarCodebook(strategy.compute_centroids(b, d))
