"""Read what a safetensors file says about itself, believing nothing that its size contradicts."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 100 << 20
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class HeaderError(ValueError):
    """Raised when a weight file's header does not fit the file."""


class Tensor(NamedTuple):
    """One array of a file: type as the file spells it, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
    """Arrays of a safetensors file by name; only the header is read.

    Raises:
        HeaderError: when the file is cut short, or its header is too large, is not JSON, or names
            bytes that the file does not have.
        OSError: when it cannot be read.
    """
    length = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise HeaderError(f"{path.name} is empty or cut short ({length} bytes)")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > min(MAX_HEADER_BYTES, length - 8):
            raise HeaderError(
                f"{path.name} is {length} bytes long but names a header of {header_bytes} bytes"
            )
        raw = file.read(header_bytes)
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"the header of {path.name} is not JSON") from error
    if not isinstance(entries, dict):
        raise HeaderError(f"the header of {path.name} is not a table")
    entries.pop("__metadata__", None)
    body = length - 8 - header_bytes
    tensors = {name: _tensor(path, name, entry, body) for name, entry in entries.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total != body:
        raise HeaderError(
            f"{path.name} holds {body} bytes of weights but its header names {total}: "
            f"the download was probably cut short"
        )
    return tensors


def _tensor(path: Path, name: str, entry: Any, body: int) -> Tensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, stop = (int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise HeaderError(f"{path.name}: the entry of {name!r} cannot be read") from error
    if not 0 <= start <= stop <= body or min(shape, default=0) < 0:
        raise HeaderError(
            f"{path.name} is cut short: {name!r} lies at bytes {start} to {stop} of {body}"
        )
    bits = ITEM_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != 8 * (stop - start):
        raise HeaderError(f"{path.name}: {name!r} has a shape that does not fit its bytes")
    return Tensor(dtype, shape, stop - start)
