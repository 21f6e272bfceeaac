"""What one method found, and what is asked of the methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LOT = "random"
RECENCY = "streaming_llm"
QUERY_AWARE = (
    "snapkv",
    "h2o",
    "tova",
    "pyramidkv",
    "chunkkv",
    "keyformer",
    "morphkv",
    "rocketkv",
    "kvzip context",
)
"""Methods that choose by attention: a question in the window tells them what will be needed."""
BLIND = ("kvzip reconstruct", "kvzip reconstruct, model", "nestedkv")
"""Methods made for questions that are not known yet, and whom they must beat."""
WINDOW_METHOD = "snapkv"


@dataclass
class Answers:
    """Of each question: whether it was answered, and the mean log-probability of its digits."""

    found: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    def add(self, log_probs: Sequence[np.ndarray], answer: Sequence[int]) -> None:
        """Judge one question.

        Args:
            log_probs: (V,) after the question, and after each token of the answer but the last.
            answer: its tokens, the first of which parts it from the question.
        """
        pairs = list(zip(log_probs, answer, strict=True))
        self.found.append(all(int(log_p.argmax()) == token for log_p, token in pairs))
        self.logp.append(float(np.mean([log_p[token] for log_p, token in pairs[1:]])))


@dataclass
class Find:
    """One method at one budget and length.

    Attributes:
        name: what was measured.
        kind: exact, ours or random.
        share: of the prompt's tokens that may stay.
        prompt: tokens of the prompt.
        nbytes: bytes held after the prompt, floats counted as 16 bits.
        window: answers to questions that ended the prompt; none where that is not measured.
        unknown: answers to questions that came after the prompt was compressed.
        kl: mean KL divergence from the exact cache after the prompt, nats a token.
        kl_error: standard error of that mean.
        same_top: share of tokens whose most likely successor is the same.
    """

    name: str
    kind: str
    share: float
    prompt: int
    nbytes: int = 0
    window: Answers = field(default_factory=Answers)
    unknown: Answers = field(default_factory=Answers)
    kl: float = 0.0
    kl_error: float = 0.0
    same_top: float = 1.0


def mean(values: Sequence[float]) -> float | None:
    """The mean, None of nothing."""
    return float(np.mean(values)) if values else None


def _gap(mine: Sequence[float], other: Sequence[float]) -> float:
    """Mean difference over the same questions."""
    return float(np.mean(np.subtract(mine, other)))


def _worst(
    finds: Sequence[Find], name: str, rivals: Sequence[str], side: str
) -> tuple[float, Find, str] | None:
    """Least lead in log-probability over any rival, length and share; where; over whom."""
    table = {(f.name, f.prompt, f.share): f for f in finds}

    def leads() -> Iterator[tuple[float, Find, str]]:
        for mine in (f for f in finds if f.name == name):
            for rival in rivals:
                other = table.get((rival, mine.prompt, mine.share))
                if other is not None:
                    sides = getattr(mine, side).logp, getattr(other, side).logp
                    yield _gap(*sides), mine, rival

    return min(leads(), key=lambda lead: lead[0], default=None)


def targets(
    finds: Sequence[Find], excused: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Whether methods beat whom they must; `excused` says why one may not.

    Query-aware methods are to beat recency and the lot when the question is in the window; those
    made for unknown questions snapkv when it is not.
    """
    asked = [
        *((name, (LOT, RECENCY), "window", "in the window") for name in QUERY_AWARE),
        *((name, (WINDOW_METHOD,), "unknown", "unknown") for name in BLIND),
    ]
    out = []
    for name, rivals, side, where in asked:
        if (found := _worst(finds, name, rivals, side)) is None:
            continue
        lead, mine, rival = found
        reason = "" if lead > 0 else (excused or {}).get(name, "")
        out.append(
            {
                "name": f"{name}, question {where}",
                "asked": f"digits likelier than with {' and '.join(rivals)} at every length and "
                f"share: least lead in nats above 0 (it is at {mine.prompt} tokens, "
                f"{mine.share:.0%}, over {rival})",
                "limit": 0.0,
                "reached": lead,
                "holds": lead > 0,
                "judged": not reason,
                "excused": reason,
            }
        )
    return out


def number(value: float | None, form: str) -> str:
    """A number, or a dash where nothing was measured."""
    return "–" if value is None else format(value, form)


def line(find: Find) -> str:
    """One find for a terminal."""
    window, unknown = find.window, find.unknown
    return (
        f"T={find.prompt:<5} {find.name:<18} {find.share:4.0%} {find.nbytes / 2**20:7.2f} MiB  "
        f"in the window {number(mean(window.found), '4.0%'):>4} "
        f"{number(mean(window.logp), '.2f'):>6}  "
        f"unknown {number(mean(unknown.found), '4.0%'):>4} "
        f"{number(mean(unknown.logp), '.2f'):>6}"
    )
