"""How RocketKV splits a compression ratio: rows kept, pages of keys, channels and tokens read.

Source: RocketKV (arXiv 2502.14051), section 3.4.
"""

from dataclasses import dataclass
from math import ceil, floor, log2, sqrt

SPLIT_BASE, SPLIT_SLOPE = 0.2, 0.06
SPLIT_LEAST, SPLIT_MOST = 0.2, 0.8


def split_compression_ratio(c: float) -> tuple[float, float]:
    """Ratios of the two stages, eviction and reading, whose product is `c`.

    Raises:
        ValueError: for a ratio below 1.
    """
    if not c >= 1:
        raise ValueError(f"a compression ratio of {c!r} is not possible; give at least 1")
    share = min(max(SPLIT_BASE + SPLIT_SLOPE * log2(c), SPLIT_LEAST), SPLIT_MOST)
    return c**share, c ** (1 - share)


def split_hsa_dims(stage2_ratio: float) -> tuple[int, float]:
    """Rows of a page, and the ratio left for the channels of a head."""
    page = ceil(sqrt(stage2_ratio))
    page = page if page <= stage2_ratio else 1
    return page, stage2_ratio / page


@dataclass(frozen=True)
class PageSplit:
    """Sizes of both stages under a total `ratio` of tokens read.

    `page_size` and `channels` override the split where they are set; `n_sink` first rows and the
    `window` last ones always stay.
    """

    ratio: float
    n_sink: int
    window: int
    page_size: int | None = None
    channels: int | None = None

    @property
    def stages(self) -> tuple[float, float]:
        """Ratios of eviction and of reading."""
        return split_compression_ratio(self.ratio)

    @property
    def page(self) -> int:
        """Rows that share one lower and one upper bound."""
        return self.page_size or split_hsa_dims(self.stages[1])[0]

    def head_channels(self, dim: int) -> int:
        """Channels of a head of `dim` that estimates read."""
        wanted = self.channels or floor(dim * self.page / self.stages[1])
        return min(dim, max(1, wanted))

    def rows(self, tokens: int) -> int:
        """Rows kept of a prompt, should it be longer."""
        return max(floor(tokens / self.stages[0]), self.n_sink + self.window + 1)

    def read(self, tokens: int) -> int:
        """Tokens that a single query reads exactly after a prompt of so many."""
        return tokens if self.ratio == 1 else max(1, floor(tokens / (2 * self.ratio)))
