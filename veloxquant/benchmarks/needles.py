"""Facts hidden in prose, and the questions that ask for them.

A fact is a sentence that ends in a number of five digits; the question is its beginning, to be
continued by the model. Small models answer such completions without a fault where they fail the
same question put as a chat. Many facts lie in one text, each worded in its own way: facts that
differ in a name alone are mixed up by a small model even with every token in its cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from veloxquant.benchmarks.demo import token_ids

FORMS = (
    "The yellow taxi has licence plate",
    "The Oslo choir sings in room",
    "The old telescope counted stars:",
    "The garden gate needs the code",
    "The bicycle lock of Alice reads",
    "The spy signs letters as agent",
    "The Lima train carries freight wagon",
    "The bronze statue of Apollo weighs",
    "The lottery ticket of Marie bears",
    "The city library holds volumes:",
    "The satellite Vega transmits at",
    "The magic number for Cairo is",
)
"""Of equal length to the demo model, so that all questions go through it together."""
SHALLOWEST, DEEPEST = 0.05, 0.95
"""Depths of the first and of the last fact, as shares of the text."""


@dataclass(frozen=True)
class Needle:
    """One fact: tokens of the question, tokens of the answer, and where it lies in the text.

    The answer begins with what parts it from the question, and its digits come after that.
    """

    question: list[int]
    answer: list[int]
    place: int


@dataclass(frozen=True)
class Haystack:
    """Tokens of a text with facts in it, and of the prose that goes on after it."""

    tokens: list[int]
    needles: list[Needle]
    following: list[int]


def haystack(
    tokenizer: Any,
    text: str,
    length: int,
    *,
    forms: Sequence[str] = FORMS,
    following: int = 0,
    skip: int = 0,
    seed: int = 0,
) -> Haystack:
    """A text of `length` tokens, one fact of each form in it at even depths.

    Facts stand where a sentence of the text ends, in an order and with numbers drawn from `seed`.

    Args:
        tokenizer: of the `tokenizers` library.
        text: the prose.
        length: tokens in all, facts included.
        forms: beginnings of the facts.
        following: tokens of the prose to go on with afterwards.
        skip: tokens of the prose to leave out at the start.
        seed: of order and numbers.

    Raises:
        ValueError: when the text is too short, or has fewer ends of sentences than there are facts.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(forms))
    numbers = rng.integers(10_000, 100_000, len(forms))
    facts = [_fact(tokenizer, forms[int(i)], int(numbers[int(i)])) for i in order]
    end = tokenizer.encode(".").ids
    room = length - sum(len(q) + len(a) + len(end) for q, a in facts)
    if room < len(facts):
        raise ValueError(f"{len(facts)} facts do not fit into {length} tokens")
    prose = token_ids(tokenizer, text, room + following, skip)
    ends = [i + 1 for i in range(room - 1) if tokenizer.id_to_token(prose[i]).endswith(".")]
    tokens: list[int] = []
    needles: list[Needle] = []
    done = 0
    for (question, answer), place in zip(facts, _spread(ends, room, len(facts)), strict=True):
        tokens += prose[done:place]
        needles.append(Needle(question, answer, len(tokens)))
        tokens += [*question, *answer, *end]
        done = place
    tokens += prose[done:room]
    return Haystack(tokens, needles, prose[room:])


def _fact(tokenizer: Any, form: str, number: int) -> tuple[list[int], list[int]]:
    """Tokens of a question and of its answer."""
    return tokenizer.encode(f" {form}").ids, tokenizer.encode(f" {number}").ids


def _spread(ends: Sequence[int], room: int, count: int) -> list[int]:
    """Ascending places among `ends`, nearest to even depths, none taken twice."""
    if len(ends) < count:
        raise ValueError(f"{count} facts need as many ends of sentences; the text has {len(ends)}")
    step = (DEEPEST - SHALLOWEST) / max(1, count - 1)
    free = list(ends)
    places: list[int] = []
    for number in range(count):
        wanted = (SHALLOWEST + number * step) * room
        # Later facts need an end each after this one.
        usable = free[: len(free) - (count - number - 1)]
        chosen = min(usable, key=lambda place: abs(place - wanted))
        free = free[free.index(chosen) + 1 :]
        places.append(chosen)
    return places
