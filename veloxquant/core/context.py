"""Values that pass between the stages of an encoder: its payload, its output, polar angles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

NUMBER_BYTES = 8
"""Bytes counted for a plain Python number stored where an array is expected."""


@dataclass
class QuantizationContext:
    """Carry one batch through a chain of `QuantizationHandler` stages, which change it in place.

    Attributes:
        x_original: input vectors, (batch, d); no stage changes them.
        mode: whether the chain encodes or decodes.
        x_current: working copy, changed by each stage.
        norm: L2 norm per vector, (batch,).
        rotated: vectors after the rotation stage, (batch, d).
        indices: codebook indices, (batch, d), uint8.
        signs: sign bits of the sketch, (batch, m), int8.
        residual_norm: L2 norm of the residual, (batch,).
        angles: polar angles, one array per level.
        final_radius: radius after all polar levels, (batch,).
        outlier_idx: channel positions of the outliers.
        packed_bits: bit-packed indices.
        metadata: whatever a stage wants to hand on under its own key.
    """

    x_original: Any
    mode: Literal["encode", "decode"]
    x_current: Any
    norm: Any | None = None
    rotated: Any | None = None
    indices: Any | None = None
    signs: Any | None = None
    residual_norm: Any | None = None
    angles: list[Any] | None = None
    final_radius: Any | None = None
    outlier_idx: np.ndarray | None = None
    packed_bits: np.ndarray | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class EncodedVector:
    """Hold what a `Quantizer` made of a batch; each quantizer fills its own fields.

    Attributes:
        quantizer_type: registry key of the quantizer that made it.
        batch_size: vectors encoded.
        dim: their length before encoding.
        indices: codebook indices, (batch, d), uint8.
        norm: L2 norm per vector, (batch,), fp16.
        signs: sign bits of the sketch, (batch, m), int8.
        residual_norm: L2 norm of the residual, (batch,), fp16.
        angles: polar angles, one (batch, d / 2^level) array per level.
        final_radius: polar radius, (batch,), fp16.
        outlier_idx: channel positions of the outliers.
        outlier_encoded: the outlier channels, encoded.
        inlier_encoded: the other channels, encoded.
    """

    quantizer_type: str
    batch_size: int
    dim: int
    indices: Any | None = None
    norm: Any | None = None
    signs: Any | None = None
    residual_norm: Any | None = None
    angles: list[Any] | None = None
    final_radius: Any | None = None
    outlier_idx: np.ndarray | None = None
    outlier_encoded: EncodedVector | None = None
    inlier_encoded: EncodedVector | None = None

    def memory_bytes(self) -> int:
        """Sum the bytes of every stored array, nested parts and outlier positions included.

        Returns:
            Bytes of the arrays as stored; an array reachable twice counts once.

        Raises:
            TypeError: when a field holds something whose size cannot be known.
        """
        sizes = {id(part): _size(part) for part in _parts(self)}
        return sum(sizes.values())


@dataclass
class TransformResult:
    """Hold the output of the recursive polar transform.

    Attributes:
        angles: one array per level; `angles[i]` has shape (batch, d / 2^(i+1)).
        final_radius: radius at the end of the recursion, (batch,).
        n_levels: levels applied.
    """

    angles: list[Any]
    final_radius: Any
    n_levels: int


_LABELS = frozenset({"quantizer_type", "batch_size", "dim"})


def _parts(value: Any) -> Iterator[Any]:
    """Walk an encoded vector, lists and tuples down to what has a size of its own."""
    if value is None:
        return
    if isinstance(value, EncodedVector):
        for item in fields(value):
            if item.name not in _LABELS:
                yield from _parts(getattr(value, item.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    else:
        yield value


def _size(part: Any) -> int:
    if isinstance(part, bytes | bytearray):
        return len(part)
    if isinstance(part, int | float):
        return NUMBER_BYTES
    nbytes = getattr(part, "nbytes", None)
    if not isinstance(nbytes, int):
        raise TypeError(
            f"an encoded vector holds a {type(part).__name__}, whose size is unknown; "
            "store arrays, bytes or numbers"
        )
    return nbytes
