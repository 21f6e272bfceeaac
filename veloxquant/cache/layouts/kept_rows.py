"""The form of the rows that an evicting method keeps, and what rows of that form take."""

from typing import NamedTuple, Self

from veloxquant.cache.plans import COMPUTE_ITEMSIZE, PREFILL_CHUNK, exact_workspace, workspace
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import WINDOW_STEP, CodecSpec, LayerShape, round_up
from veloxquant.quantizers.specs.affine import AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.plain import PlainSpec

STORAGE_GROUP = 32
"""Channels that share a scale where kept rows are in affine groups."""
EXACT = (PlainSpec(), PlainSpec())


def storage_specs(config: KVCacheConfig) -> tuple[CodecSpec, CodecSpec] | None:
    """Forms of kept keys and values, None for rows as they came."""
    form = config.eviction_storage
    if form == "exact":
        return None
    bits = int(form[-1])
    if form.startswith("affine"):
        return AffineTokenSpec(bits, STORAGE_GROUP), AffineTokenSpec(bits, STORAGE_GROUP)
    return (
        CodebookSpec(bits, config.seed, unbiased=True),
        CodebookSpec(bits, config.seed + 1, unbiased=False),
    )


class KeptRows(NamedTuple):
    """Rows of keys and values of one layer in the forms `specs`; their stores grow by a step."""

    shape: LayerShape
    specs: tuple[CodecSpec, CodecSpec]

    @classmethod
    def of(cls, config: KVCacheConfig, shape: LayerShape) -> Self:
        """Rows in the form that a configuration asks for."""
        return cls(shape, storage_specs(config) or EXACT)

    @property
    def is_exact(self) -> bool:
        """Whether rows are held as they came."""
        return isinstance(self.specs[0], PlainSpec)

    def keys(self, rows: int) -> int:
        """Bytes of the keys of `rows` rows, growth steps included."""
        return self._side(0, round_up(rows, WINDOW_STEP))

    def nbytes(self, rows: int) -> int:
        """Bytes of `rows` rows, growth steps included."""
        return sum(self._side(side, round_up(rows, WINDOW_STEP)) for side in (0, 1))

    def at_peak(self, rows: int) -> int:
        """Bytes of the rows held while a prompt is read."""
        return sum(self._side(side, rows) for side in (0, 1))

    def work(self, rows: int, *, tiled: bool = False) -> int:
        """Transient bytes while a chunk of a prompt attends to `rows` rows and they are scored.

        `tiled` rows are exact and read tile by tile all the same. Packed rows are unpacked for
        their score.
        """
        if self.is_exact:
            room = exact_workspace(self.shape, rows, PREFILL_CHUNK)
            return max(room, workspace(self.shape, rows, PREFILL_CHUNK)) if tiled else room
        return workspace(self.shape, rows, PREFILL_CHUNK) + self.unpacked(rows)

    def unpacked(self, rows: int) -> int:
        """Transient bytes of all rows unpacked; exact ones are there already."""
        if self.is_exact:
            return 0
        dims = self.shape.k_dim + self.shape.v_dim
        return self.shape.n_kv_heads * rows * dims * COMPUTE_ITEMSIZE

    def _side(self, side: int, rows: int) -> int:
        dim = (self.shape.k_dim, self.shape.v_dim)[side]
        return self.shape.n_kv_heads * self.specs[side].nbytes(rows, dim, self.shape.itemsize)
