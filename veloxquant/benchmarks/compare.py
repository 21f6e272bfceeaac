"""Who is better at equal bytes: our outcomes against those of the rivals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    """

    name: str
    kind: str
    kl: float
    kl_error: float
    same_top: float
    perplexity: float
    nbytes: int
    bits: float


@dataclass(frozen=True)
class Verdict:
    """One of ours against a rival at the same bytes; `how` says where the rival's KL is from."""

    name: str
    kl: float
    rival_kl: float
    how: str
    holds: bool


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
            verdicts.append(Verdict(mine.name, mine.kl, kl, how, mine.kl <= kl))
    return verdicts
