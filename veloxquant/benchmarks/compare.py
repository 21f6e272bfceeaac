"""Who is better at equal bytes: our outcomes against those of the rivals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from veloxquant.benchmarks.planned import EXPECTED_WORSE, NO_LADDER

FLOOR = 1e-6
"""KL below which differences are noise of the arithmetic."""


@dataclass(frozen=True)
class Outcome:
    """What one cache did to a model's answers, and at what size.

    Attributes:
        name: what was measured.
        kind: exact, ours, stock, evicting or random.
        kl: mean KL divergence from the exact cache, nats a token.
        kl_error: standard error of that mean.
        same_top: share of tokens whose most likely successor is the same.
        perplexity: of the text that really follows.
        nbytes: bytes of one sequence, floats counted as 16 bits.
        bits: the same per element of all keys and values read.
        method: name of the method table, empty for rivals.
        width: bits asked for, None without a setting of bits.
        default: whether these are the method's defaults.
    """

    name: str
    kind: str
    kl: float
    kl_error: float
    same_top: float
    perplexity: float
    nbytes: int
    bits: float
    method: str = ""
    width: int | None = None
    default: bool = False


@dataclass(frozen=True)
class Verdict:
    """One of ours against a rival at the same bytes; `how` says where the rival's KL is from.

    `judged` is whether it is a target to be no worse: other widths than the default are for
    information. `excused` is why a method may be worse, empty if it is not.
    """

    name: str
    kl: float
    rival_kl: float
    how: str
    holds: bool
    judged: bool = True
    excused: str = ""


def rival_at(rivals: Sequence[Outcome], nbytes: int) -> tuple[float, str] | None:
    """The KL that the rival would have with `nbytes` bytes, and how that was found.

    Settings that are no better than a smaller one are left out. Between two settings the logarithm
    of KL is a straight line in bytes: one bit more a value divides the squared error, and with it
    KL, by four. Below the smallest setting it is that of the smallest, which has more bytes; above
    the largest that of the largest, which has fewer. None without rivals.
    """
    front: list[Outcome] = []
    for point in sorted(rivals, key=lambda p: (p.nbytes, p.kl)):
        if not front or point.kl < front[-1].kl:
            front.append(point)
    if not front:
        return None
    if nbytes <= front[0].nbytes:
        return front[0].kl, f"{front[0].name}, which has more bytes"
    for low, high in pairwise(front):
        if nbytes <= high.nbytes:
            share = (nbytes - low.nbytes) / (high.nbytes - low.nbytes)
            a, b = math.log(max(low.kl, FLOOR)), math.log(max(high.kl, FLOOR))
            return math.exp(a + share * (b - a)), f"between {low.name} and {high.name}"
    return front[-1].kl, f"{front[-1].name}, which has fewer bytes"


def judge(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Packed methods against mlx-lm's quantized cache, evicting ones against eviction by lot."""
    stock = [o for o in outcomes if o.kind == "stock"]
    verdicts = []
    for mine in outcomes:
        if mine.kind == "ours":
            found = rival_at(stock, mine.nbytes)
        elif mine.kind == "evicting":
            method = mine.name.split()[0]
            twin = [o for o in outcomes if o.kind == "random" and o.name.endswith(method)]
            found = (twin[0].kl, twin[0].name) if twin else None
        else:
            continue
        if found is not None:
            kl, how = found
            holds = mine.kl <= kl
            excused = "" if holds else EXPECTED_WORSE.get(mine.method, "")
            judged = (mine.default or mine.kind == "evicting") and not excused
            verdicts.append(Verdict(mine.name, mine.kl, kl, how, holds, judged, excused))
    return verdicts


def ladders(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Whether each method's error falls with every bit that it is given."""
    out = []
    for method in dict.fromkeys(o.method for o in outcomes if o.method):
        steps = sorted(
            (o.width, o.kl) for o in outcomes if o.method == method and o.width is not None
        )
        if len(steps) < 2:
            continue
        reached = max(more / max(less, FLOOR) for (_, less), (_, more) in pairwise(steps))
        excused = "" if reached < 1.0 else NO_LADDER.get(method, "")
        widths = ", ".join(str(width) for width, _ in steps)
        out.append(
            {
                "name": method,
                "asked": f"KL falls with every step of {widths} bits, so below 1 of the last",
                "limit": 1.0,
                "reached": reached,
                "holds": reached < 1.0,
                "judged": not excused,
                "excused": excused,
            }
        )
    return out


def best_of_four(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Whether one of ours with fewer bytes is better than each of mlx-lm's 4-bit caches."""
    out = []
    for rival in (o for o in outcomes if o.kind == "stock" and o.name.startswith("mlx-lm 4 bit")):
        smaller = [o for o in outcomes if o.kind == "ours" and o.nbytes < rival.nbytes]
        if not smaller:
            continue
        best = min(smaller, key=lambda o: o.kl)
        reached = best.kl / max(rival.kl, FLOOR)
        out.append(
            {
                "name": f"{best.name}, best with fewer bytes",
                "asked": f"KL below 1 of that of {rival.name}",
                "limit": 1.0,
                "reached": reached,
                "holds": reached < 1.0,
            }
        )
    return out
