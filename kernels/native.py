"""The compiled CPU kernel through ctypes: loading, describing stores to it, calling it.

The library is an optional extension. Where it is missing (no compiler at install time) or the
backend is a GPU, everything works through MLX's own operations.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

PLAIN, AFFINE_TOKEN, AFFINE_CHANNEL, CODEBOOK, VECTOR, SPARSE, POLAR = range(7)
FORMS = 4
"""Version of the forms that the compiled library must have: `VQ_FORMS` in its sources."""
MAX_ROWS = 64
MAX_DIM = 512
POLYNOMIAL_BITS = 4
_TYPES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2, mx.int8: 3}
_PTR = ctypes.c_void_p


class _Run(ctypes.Structure):
    """Mirror of `vq_run`."""

    _fields_ = [
        ("kind", ctypes.c_int32), ("bits", ctypes.c_int32), ("group", ctypes.c_int32),
        ("type", ctypes.c_int32), ("start", ctypes.c_int32), ("stop", ctypes.c_int32),
        ("width", ctypes.c_int32), ("capacity", ctypes.c_int32), ("dim", ctypes.c_int32),
        ("add", ctypes.c_int32),
        ("data", _PTR), ("scale", _PTR), ("bias", _PTR), ("levels", _PTR), ("book", _PTR),
        ("signs", _PTR), ("book_type", ctypes.c_int32),
        ("data_batch", ctypes.c_int64), ("data_head", ctypes.c_int64), ("data_row", ctypes.c_int64),
        ("scale_batch", ctypes.c_int64), ("scale_head", ctypes.c_int64),
        ("scale_row", ctypes.c_int64), ("book_batch", ctypes.c_int64),
        ("book_head", ctypes.c_int64), ("book_part", ctypes.c_int64),
        ("sign_batch", ctypes.c_int64), ("sign_head", ctypes.c_int64),
        ("sign_row", ctypes.c_int64), ("q", _PTR), ("out", _PTR),
    ]  # fmt: skip


class _Call(ctypes.Structure):
    """Mirror of `vq_call`."""

    _fields_ = [
        ("keys", ctypes.POINTER(_Run)), ("values", ctypes.POINTER(_Run)),
        ("n_keys", ctypes.c_int32), ("n_values", ctypes.c_int32), ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32), ("rows", ctypes.c_int32), ("length", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("causal", ctypes.c_int32), ("sinks", _PTR), ("mask", _PTR),
        ("mask_batch", ctypes.c_int64), ("part", ctypes.c_int32),
        ("parts", ctypes.c_int32), ("failed", ctypes.c_int32),
    ]  # fmt: skip


class _Rows(ctypes.Structure):
    """Mirror of `vq_rows`."""

    _fields_ = [
        ("run", ctypes.POINTER(_Run)), ("batch", ctypes.c_int32), ("heads", ctypes.c_int32),
        ("dim", ctypes.c_int32), ("out", _PTR), ("part", ctypes.c_int32),
        ("parts", ctypes.c_int32),
    ]  # fmt: skip


class Basis(Protocol):
    """A linear map between the model's channels and those that a run is coded in.

    Where the map is one product with a constant matrix and back one with its transpose, a method
    `product` gives that matrix, (D, dim) or (H, D, dim) fp32 in numpy: `rotate_query` is
    `q @ product()`.
    """

    def rotate_query(self, q: mx.array) -> mx.array:
        """Queries (B, H, M, D) so that products with coded rows are those with the rows."""
        ...

    def unrotate(self, x: mx.array) -> mx.array:
        """Sums of coded rows (B, H, M, dim) as sums of rows (B, H, M, D)."""
        ...


class NativeRun(NamedTuple):
    """A run of tokens as the kernel reads it: arrays with their token axis at capacity.

    `kind` says how a row of `data` (B, H, T, words) is read:

    - PLAIN: `width` floats.
    - AFFINE_TOKEN: `bits`-bit codes, `scale` and `bias` for each `group` channels.
    - AFFINE_CHANNEL: the same on the transposed block (B, H, D, words), groups of tokens.
    - CODEBOOK: `bits`-bit codes in planes into `levels`, times `scale` (B, H, T, 1) or 1.
    - VECTOR: a stream of width/group codes of `bits` bits (at most 16) into `book`
      (B or 1, H or 1, width/group or 1, 2^bits, group), times `scale` or 1; `signs`
      (B, H, T, width/32) turns channels whose bit is 0.
    - POLAR: signs and angle codes of a binary tree, `book` (width - 1, 2^bits, 2) fp32 sines and
      cosines, times `scale`.
    - SPARSE: `width` slots, `data` uint8 or uint16 channels (past the end: empty), `scale` values,
      int8 ones too.

    `basis` is the map
    that queries and outputs of this run are in, None for the model's own; `dim` counts its channels
    where they are not the head's.
    """

    kind: int
    data: mx.array
    start: int
    stop: int
    width: int
    bits: int = 0
    group: int = 1
    scale: mx.array | None = None
    bias: mx.array | None = None
    levels: np.ndarray | None = None
    basis: Basis | None = None
    dim: int | None = None
    book: mx.array | None = None
    signs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before the kernel reads it."""
        held = (self.data, self.scale, self.bias, self.book, self.signs)
        return [a for a in held if a is not None]


def table(levels: Sequence[float], scale: float) -> np.ndarray:
    """Levels times `scale` as the kernel wants them: with the odd polynomial through them.

    Up to `POLYNOMIAL_BITS` bits the symmetric levels are evaluated as a polynomial of the code
    centred to [-1, 1], which needs no lookup.
    """
    half = len(levels) // 2
    out = np.asarray(levels, dtype=np.float64) * scale
    if len(levels) > 1 << POLYNOMIAL_BITS:
        return out.astype(np.float32)
    x = np.arange(len(levels)) * (2 / max(1, len(levels) - 1)) - 1
    powers = x[half:, None] ** (2 * np.arange(half) + 1)
    return np.concatenate([out, np.linalg.solve(powers, out[half:])]).astype(np.float32)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where it was not built or is switched off.

    `VELOXQUANT_NATIVE=0` switches it off; a path in it loads that build instead.
    """
    choice = os.environ.get("VELOXQUANT_NATIVE", "1")
    if choice == "0":
        return None
    built = sorted(Path(__file__).parent.glob("_packed*.so"))
    for path in [Path(choice)] if "/" in choice else built:
        try:
            lib = ctypes.CDLL(str(path))
            lib.vq_abi.restype = ctypes.c_int
            sizes = ctypes.sizeof(_Run) * 1000 + ctypes.sizeof(_Call)
            if lib.vq_abi() != FORMS * 10_000_000 + sizes:
                continue
        except (OSError, AttributeError):
            continue
        lib.vq_attend.argtypes = [ctypes.POINTER(_Call), ctypes.c_int]
        lib.vq_attend.restype = ctypes.c_int
        return lib
    return None


def type_code(dtype: mx.Dtype) -> int:
    """The kernel's number for a floating type."""
    return _TYPES[dtype]


def seen(a: mx.array) -> np.ndarray:
    """The array's own memory, evaluated; bf16 has no numpy type and is seen as uint16."""
    return np.asarray(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)


def _steps(a: np.ndarray, axes: int) -> tuple[int, ...]:
    """Elements between neighbours along the first axes; 0 along an axis of one, which is shared."""
    return tuple(
        0 if n == 1 else s // a.itemsize
        for n, s in zip(a.shape[:axes], a.strides[:axes], strict=True)
    )


def address(a: np.ndarray) -> int:
    """Address of an array's memory."""
    return a.__array_interface__["data"][0]


def _describe(run: NativeRun, keep: list[np.ndarray]) -> _Run:
    data = seen(run.data)
    if data.strides[-1] != data.itemsize:  # fresh rows may be views of the model's own arrays
        data = np.ascontiguousarray(data)
    out = _Run()
    out.kind, out.bits, out.group = run.kind, run.bits, run.group
    out.start, out.stop, out.width = run.start, run.stop, run.width
    channels = run.kind == AFFINE_CHANNEL
    out.capacity = data.shape[3] * 32 // run.bits if channels else data.shape[2]
    if run.kind == SPARSE:
        out.bits = data.itemsize * 8
    item = data.itemsize
    out.data = address(data)
    out.data_batch, out.data_head, out.data_row = (s // item for s in data.strides[:3])
    keep.append(data)
    typed = run.scale if run.scale is not None else run.data
    out.type = _TYPES.get(typed.dtype, 0)
    if run.scale is not None:
        scale = seen(run.scale)
        out.scale = address(scale)
        size = scale.itemsize
        out.scale_batch, out.scale_head, out.scale_row = (s // size for s in scale.strides[:3])
        keep.append(scale)
    if run.bias is not None:
        bias = seen(run.bias)
        out.bias = address(bias)
        keep.append(bias)
    if run.book is not None:
        book = seen(run.book)
        out.book, out.book_type = address(book), _TYPES[run.book.dtype]
        if run.kind == VECTOR:
            out.book_batch, out.book_head, out.book_part = _steps(book, 3)
        keep.append(book)
    if run.signs is not None:
        signs = seen(run.signs)
        out.signs = address(signs)
        out.sign_batch, out.sign_head, out.sign_row = _steps(signs, 3)
        keep.append(signs)
    if run.levels is not None:
        out.levels = address(run.levels)
        keep.append(run.levels)
    return out


def attend(
    queries: Sequence[np.ndarray],
    keys: Sequence[NativeRun],
    values: Sequence[NativeRun],
    outs: Sequence[np.ndarray],
    *,
    tokens: int,
    length: int,
    causal: bool,
    sinks: np.ndarray | None,
    mask: np.ndarray | None,
    threads: int,
    added: frozenset[int] = frozenset(),
) -> bool:
    """Attention of one layer and step, from packed arrays that are evaluated already.

    Args:
        queries: one (B, H, M, dim) fp32 array a key run, in that run's basis, scaled.
        keys: key runs in token order.
        values: value runs in token order.
        outs: one (B, H, M, dim) fp32 array a value run; runs that share an array add into it.
        tokens: tokens in all.
        length: queries of the step; M is a multiple of it.
        causal: hide newer tokens from each query.
        sinks: (H, M) fp32 logits that join the denominator only, or None.
        mask: (B or 1, length, tokens) fp32 added to the scores, or None.
        threads: most threads to use.
        added: identities of runs that cover the tokens of the run before them and add to it.

    Returns:
        False when the kernel does not take these shapes; nothing is written then.

    Raises:
        MemoryError: when the kernel finds no memory for the scores.
    """
    lib = library()
    assert lib is not None
    keep: list[np.ndarray] = []
    key_runs = (_Run * len(keys))(*(_describe(r, keep) for r in keys))
    value_runs = (_Run * len(values))(*(_describe(r, keep) for r in values))
    for struct, q, run in zip(key_runs, queries, keys, strict=True):
        struct.q, struct.dim, struct.add = address(q), q.shape[-1], int(id(run) in added)
    for struct, out, run in zip(value_runs, outs, values, strict=True):
        struct.out, struct.dim, struct.add = address(out), out.shape[-1], int(id(run) in added)
    batch, heads, rows, _ = queries[0].shape
    call = _Call()
    call.keys, call.values = key_runs, value_runs
    call.n_keys, call.n_values = len(keys), len(values)
    call.batch, call.heads, call.rows, call.length = batch, heads, rows, length
    call.tokens = tokens
    call.causal = int(causal)
    call.sinks = None if sinks is None else address(sinks)
    if mask is not None:
        call.mask = address(mask)
        call.mask_batch = mask.shape[1] * mask.shape[2] if len(mask) > 1 else 0
    status = lib.vq_attend(ctypes.byref(call), threads)
    if status > 1:
        raise MemoryError(f"packed attention found no memory for the scores of {tokens} tokens")
    return status == 0


def decode(run: NativeRun, dim: int, threads: int) -> np.ndarray | None:
    """Tokens of a run as fp32 rows (B, H, T, dim) in the run's basis; None if it has no such form.

    The arrays of the run must be evaluated.
    """
    lib = library()
    if lib is None:
        return None
    keep: list[np.ndarray] = []
    struct = _describe(run, keep)
    batch, heads = run.data.shape[:2]
    out = np.empty((batch, heads, run.stop - run.start, dim), dtype=np.float32)
    call = _Rows(run=ctypes.pointer(struct), batch=batch, heads=heads, dim=dim, out=out.ctypes.data)
    return None if lib.vq_decode(ctypes.byref(call), threads) else out
