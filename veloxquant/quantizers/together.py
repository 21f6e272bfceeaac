"""Codecs of layers that are coded together: one takes the rows of all, each keeps its share."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from veloxquant.quantizers.base import Packed, Shared, TokenAxis


class TogetherCodec(Shared):
    """The share of layer `spec.index`; `packed` holds its own arrays and the `borrowed` ones.

    Arrays named in `borrowed` belong to the first layer; the others read them there.
    """

    spec: Any
    dim: int
    axes: dict[str, TokenAxis]
    borrowed: ClassVar[tuple[str, ...]] = ()
    """Names, or beginnings of names, of arrays that are shared."""

    @abstractmethod
    def encode_together(self, rows: Sequence[mx.array], fitted: Sequence[Packed]) -> list[Packed]:
        """Own arrays of every layer for the rows (B, H, n, D) of all, n whole blocks."""

    def fit_together(self, rows: Sequence[mx.array]) -> list[Packed]:
        """Constants of every layer for the first rows of all."""
        return [{} for _ in rows]

    def is_borrowed(self, name: str) -> bool:
        """Whether an array of the first layer is read by the others."""
        return name.startswith(self.borrowed)

    # ---- one layer as if all had its rows, for shapes and types ---------------------------

    def fit(self, x: mx.array) -> Packed:
        """Own constants when every layer has the rows `x`."""
        return self.fit_together([x] * self.spec.size)[self.spec.index]

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Own arrays when every layer has the rows `x` and these constants."""
        return self.encode_together([x] * self.spec.size, [fitted] * self.spec.size)[
            self.spec.index
        ]

    def encode(self, x: mx.array) -> Packed:
        """Own arrays and constants when every layer has the rows `x`."""
        fitted = self.fit_together([x] * self.spec.size) if self.spec.fit_tokens else []
        own = self.encode_together([x] * self.spec.size, fitted)[self.spec.index]
        return {**own, **(fitted[self.spec.index] if fitted else {})}
