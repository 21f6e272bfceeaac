"""Array buffers behind the blocks of a pool; integer formats are really packed."""

from typing import Any, cast

import mlx.core as mx

from veloxquant.memory.block import Block
from veloxquant.memory.block_pool import BlockPoolAllocator

FLOATS = {"fp16": mx.float16, "bf16": mx.bfloat16, "fp32": mx.float32}
"""Formats stored as they are."""
CODE_BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
"""Formats of unsigned codes: 1, 2, 4 or 8 of them in a byte, the first in the lowest bits."""


class MLXBlockStorage:
    """Keep one buffer per block id, made on first use and reused in place by later owners.

    A buffer has `block_size` rows. For fp16, bf16 and fp32 a row is `head_dim` elements; for int8,
    int4, int2 and int1 it is `head_dim` codes packed along the head dimension, padded to whole
    bytes. A block whose format changed gets a new buffer. Buffers of blocks the pool has retired
    are dropped at the next call. Rows that nobody wrote since the block was checked out hold
    zeros or a former owner's data: read after writing.

    Args:
        pool: the pool whose blocks are stored.
        head_dim: elements per row, at least 1.

    Raises:
        ValueError: when `head_dim` is not positive.
    """

    def __init__(self, pool: BlockPoolAllocator, head_dim: int) -> None:
        if head_dim < 1:
            raise ValueError(f"head_dim={head_dim}: a row holds at least 1 element")
        self._pool = pool
        self._head_dim = head_dim
        self._buffers: dict[int, tuple[str, mx.array]] = {}
        self._retired = 0

    def __len__(self) -> int:
        """Buffers held."""
        return len(self._buffers)

    def buffer_for(self, block: Block) -> mx.array:
        """Buffer of a block, made or remade when it has none of the block's format.

        Returns:
            Shape (block_size, head_dim) of the float type, or (block_size, row bytes) of uint8.

        Raises:
            ValueError: when the format is unknown.
        """
        self._drop_retired()
        held = self._buffers.get(block.block_id)
        if held is not None and held[0] == block.format:
            return held[1]
        rows = self._pool.config.block_size
        if block.format in FLOATS:
            buffer = mx.zeros((rows, self._head_dim), FLOATS[block.format])
        else:
            buffer = mx.zeros((rows, -(-self._head_dim * _bits(block) // 8)), mx.uint8)
        self._buffers[block.block_id] = (block.format, buffer)
        return buffer

    def write(self, block: Block, offset: int, values: Any) -> None:
        """Store rows in a block; `block.n_used` is the caller's to set, by `pool.mark_used`.

        Args:
            block: where to.
            offset: first slot written.
            values: shape (n, head_dim): numbers for a float format, codes from 0 to 2^bits - 1
                for an integer format.

        Raises:
            ValueError: when rows do not fit the block, have another width, or hold something
                that is not a code of the format. Nothing is written then.
        """
        rows = values if isinstance(values, mx.array) else mx.array(values)
        size = self._pool.config.block_size
        if rows.ndim != 2 or rows.shape[1] != self._head_dim:
            raise ValueError(
                f"values of shape {tuple(rows.shape)} do not fit; give (n, {self._head_dim})"
            )
        stop = offset + rows.shape[0]
        if offset < 0 or stop > size:
            raise ValueError(
                f"rows {offset} to {stop} overflow block {block.block_id}, which has {size} slots"
            )
        if block.format in FLOATS:
            rows = rows.astype(FLOATS[block.format])
        else:
            rows = _pack(_codes(rows, block), _bits(block))
        if offset == stop:
            return
        buffer = self.buffer_for(block)
        buffer[offset:stop] = rows
        mx.eval(buffer)  # else every write would keep its graph and its input alive

    def read(self, block: Block) -> mx.array:
        """Read the first `block.n_used` rows.

        Returns:
            Shape (n_used, head_dim): the float type, or codes as uint8.

        Raises:
            ValueError: when the format is unknown.
        """
        rows = self.buffer_for(block)[: block.n_used]
        if block.format in FLOATS:
            return rows
        return _unpack(rows, _bits(block))[:, : self._head_dim]

    def resident_bytes(self) -> int:
        """Bytes of all buffers held."""
        self._drop_retired()
        return sum(buffer.nbytes for _, buffer in self._buffers.values())

    def release(self, block: Block) -> None:
        """Drop the buffer of a block, if it has one."""
        self._buffers.pop(block.block_id, None)

    def _drop_retired(self) -> None:
        retired = self._pool.stats.n_retired
        if retired == self._retired:
            return
        self._retired = retired
        layout = self._pool.layout()
        managed = set(layout.free).union(*layout.held.values())
        self._buffers = {i: held for i, held in self._buffers.items() if i in managed}


def _bits(block: Block) -> int:
    bits = CODE_BITS.get(block.format)
    if bits is None:
        raise ValueError(
            f"block {block.block_id} has format {block.format!r}, which cannot be stored; "
            f"use one of {', '.join((*FLOATS, *CODE_BITS))}"
        )
    return bits


def _codes(rows: mx.array, block: Block) -> mx.array:
    """Check that `rows` are codes of the block's format, as uint8."""
    top = (1 << _bits(block)) - 1
    if not (rows.dtype == mx.bool_ or mx.issubdtype(rows.dtype, mx.integer)):
        raise ValueError(
            f"format {block.format!r} stores integer codes 0 to {top}, not {rows.dtype}; "
            "quantize the values first"
        )
    if rows.size and rows.dtype != mx.bool_:
        low, high = cast("list[int]", mx.stack([rows.min(), rows.max()]).tolist())
        if low < 0 or high > top:
            raise ValueError(
                f"codes from {low} to {high} do not fit format {block.format!r}: use 0 to {top}"
            )
    return rows.astype(mx.uint8)


def _pack(codes: mx.array, bits: int) -> mx.array:
    """(n, D) codes to (n, ceil(D·bits / 8)) bytes."""
    if bits == 8:
        return codes
    per_byte = 8 // bits
    n, dim = codes.shape
    width = -(-dim // per_byte)
    codes = mx.pad(codes, [(0, 0), (0, width * per_byte - dim)])
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    shifted = mx.left_shift(codes.reshape(n, width, per_byte), shifts)
    return shifted.sum(axis=-1).astype(mx.uint8)


def _unpack(rows: mx.array, bits: int) -> mx.array:
    """(n, W) bytes to (n, W·8 / bits) codes."""
    if bits == 8:
        return rows
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    mask = mx.array((1 << bits) - 1, mx.uint8)
    codes = mx.bitwise_and(mx.right_shift(rows[..., None], shifts), mask)
    return codes.reshape(rows.shape[0], rows.shape[1] * (8 // bits))
