"""Questions put to many caches at once: a row of the batch for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.benchmarks.field import FieldLayer
from veloxquant.benchmarks.finds import Answers
from veloxquant.benchmarks.needles import Needle
from veloxquant.benchmarks.quality import log_probs
from veloxquant.benchmarks.rivals import held_bytes

ROOM = 2 << 30
"""Bytes of caches, in 16 bits, that wait for their turn at most."""


@dataclass
class Row:
    """Caches that are to answer.

    Attributes:
        caches: one a layer.
        needle: what is asked.
        lead: tokens to read before the last one of the question; empty if that was read as well.
        answers: where the answer goes.
        heard: log-probabilities (V,) after the question and after each token of the answer.
    """

    caches: list[Any]
    needle: Needle
    lead: Sequence[int]
    answers: Answers
    heard: list[np.ndarray]


def advance(model: Any, layers: Sequence[Any], tokens: Sequence[Sequence[int]]) -> None:
    """All rows of a batch a chunk further."""
    model(mx.array([list(row) for row in tokens]), cache=list(layers))
    # As mlx-lm's generators do: the head of a prompt is never computed.
    mx.eval([x.states() if isinstance(x, FieldLayer) else x.state for x in layers])


def step(model: Any, layers: Sequence[Any], tokens: Sequence[int]) -> mx.array:
    """All rows of a batch a token further; log-probabilities (rows, V) of what follows."""
    out = log_probs(model(mx.array(list(tokens))[:, None], cache=list(layers))[:, -1])
    mx.eval(out)
    return out


def side_by_side(entrants: Sequence[Sequence[Any]]) -> list[Any]:
    """Layers that hold the caches of all entrants."""
    return [FieldLayer(rows) for rows in zip(*entrants, strict=True)]


class Questions:
    """Rows that wait until there are enough of them to go through the model together."""

    def __init__(self, model: Any, room: int = ROOM) -> None:
        self.model, self.room = model, room
        self.rows: list[Row] = []
        self.nbytes = 0

    def put(
        self,
        caches: list[Any],
        needle: Needle,
        answers: Answers,
        *,
        lead: Sequence[int] = (),
        heard: mx.array | None = None,
    ) -> None:
        """Let caches wait for their turn; `answers` may be filled later than this returns.

        Args:
            caches: of all layers, for these rows alone.
            needle: what is asked.
            answers: where the answer goes.
            lead: tokens to read before the last one of the question.
            heard: log-probabilities (V,) after the question, if it was read already.
        """
        known = [] if heard is None else [np.array(heard)]
        self.rows.append(Row(caches, needle, lead, answers, known))
        self.nbytes += sum(held_bytes(cache) for cache in caches)
        if self.nbytes >= self.room:
            self.answer()

    def answer(self) -> None:
        """Put every question that waits and judge the answers."""
        rows, self.rows, self.nbytes = self.rows, [], 0
        for some in _alike(rows, lambda row: (len(row.lead), bool(row.heard))):
            if some[0].heard:
                continue
            layers = side_by_side([row.caches for row in some])
            advance(self.model, layers, [row.lead for row in some])
            self._hear(some, layers, [row.needle.question[-1] for row in some])
        for some in _alike(rows, lambda r: (len(r.needle.question), len(r.needle.answer))):
            layers = side_by_side([row.caches for row in some])
            for place in range(len(some[0].needle.answer) - 1):
                self._hear(some, layers, [row.needle.answer[place] for row in some])
        for row in rows:
            row.answers.add(row.heard, row.needle.answer)

    def _hear(self, rows: Sequence[Row], layers: list[Any], tokens: Sequence[int]) -> None:
        """One token further; note what the rows say then."""
        out = np.array(step(self.model, layers, tokens))
        for row, log_p in zip(rows, out, strict=True):
            row.heard.append(log_p)


def _alike(rows: Sequence[Row], key: Any) -> list[list[Row]]:
    """Rows that can share a batch."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())
