"""Range coding of small integers (rANS), many interleaved states at a time.

Every state holds 32 bits and gives 16 at a time; words of all states lie in one stream in the order
in which decoding takes them. A symbol is coded by one of several tables of frequencies, which sum
to 2^PRECISION.
Source: Duda, Asymmetric numeral systems, arXiv 1311.2540; Giesen, arXiv 1402.3392.
"""

from typing import NamedTuple

import numpy as np

from veloxquant.core.exceptions import CacheStateError

PRECISION = 14
_TOTAL = 1 << PRECISION
_LOW = 1 << 16


class Coded(NamedTuple):
    """States (lanes,) uint32 after the last symbol and words uint16 in decoding order."""

    states: np.ndarray
    words: np.ndarray


def frequencies(counts: np.ndarray) -> np.ndarray:
    """Counts (tables, symbols) as frequencies that sum to 2^PRECISION; seen symbols get 1 or more.

    Tables without any count are even.
    """
    out = np.empty(counts.shape, dtype=np.uint32)
    for i, row in enumerate(counts):
        live = row > 0 if row.any() else np.ones(len(row), dtype=bool)
        weight = np.where(live, np.maximum(row, 1), 0).astype(np.float64)
        share = np.where(live, np.maximum(1, np.floor(weight / weight.sum() * _TOTAL)), 0)
        # What rounding left over or took too much belongs to the commonest symbols.
        rest = _TOTAL - int(share.sum())
        order = np.argsort(-share, kind="stable")
        for j in order if rest < 0 else order[:1]:
            step = rest if rest > 0 else max(rest, 1 - int(share[j]))
            share[j] += step
            rest -= step
            if rest == 0:
                break
        out[i] = share
    return out


def encode(symbols: np.ndarray, tables: np.ndarray, which: np.ndarray) -> Coded:
    """Code (n, lanes) symbols; `which`, of the same shape, picks the table of each.

    Args:
        symbols: non-negative integers below the width of the tables.
        tables: (tables, symbols) from `frequencies`.
        which: table of each symbol.
    """
    freq = tables[which, symbols].astype(np.uint64)
    start = (np.cumsum(tables, axis=1) - tables)[which, symbols].astype(np.uint64)
    states = np.full(symbols.shape[1], _LOW, dtype=np.uint64)
    words: list[np.ndarray] = []
    for f, s in zip(freq[::-1], start[::-1], strict=True):
        full = states >= (f << np.uint64(32 - PRECISION))
        words.append(states[full].astype(np.uint16))
        states = np.where(full, states >> np.uint64(16), states)
        states = ((states // f) << np.uint64(PRECISION)) + states % f + s
    stream = np.concatenate(words[::-1]) if words else np.zeros(0, dtype=np.uint16)
    return Coded(states.astype(np.uint32), stream)


def decode(coded: Coded, tables: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Symbols (n, lanes) uint16 of `encode`.

    Raises:
        CacheStateError: when the stream is not one that these tables gave.
    """
    tables = tables.astype(np.uint64)
    if (tables.sum(axis=1) != _TOTAL).any():
        raise CacheStateError(f"frequencies of coded symbols must sum to {_TOTAL}")
    starts = np.cumsum(tables, axis=1) - tables
    symbol_at = np.stack(
        [np.repeat(np.arange(len(row)), row.astype(np.int64)) for row in tables]
    ).astype(np.uint16)
    states, at = coded.states.astype(np.uint64), 0
    words = coded.words.astype(np.uint64)
    out = np.empty(which.shape, dtype=np.uint16)
    for i, table in enumerate(which):
        slot = states & np.uint64(_TOTAL - 1)
        out[i] = symbol_at[table, slot.astype(np.int64)]
        states = tables[table, out[i]] * (states >> np.uint64(PRECISION))
        states = states + slot - starts[table, out[i]]
        empty = states < _LOW
        need = int(empty.sum())
        if at + need > len(words):
            raise CacheStateError("the stream of coded symbols ends too early")
        states[empty] = (states[empty] << np.uint64(16)) | words[at : at + need]
        at += need
    if at != len(words) or (states != _LOW).any():
        raise CacheStateError("the stream of coded symbols is damaged")
    return out
