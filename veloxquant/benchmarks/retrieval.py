"""What methods that give up tokens still find: facts hidden in prose, and what else they change.

A prompt of prose with facts in it is read, a method gives up all rows but its budget, and the model
has to continue the beginning of each fact (`needles.py`). Each question is put twice to copies of
the same caches: as the end of the prompt, so that methods which look at queries see it while they
choose ("in the window"), and after the prompt was complete and compressed ("unknown"). An answer is
found when every token of it is the most likely one; the mean log-probability of its digits is the
finer measure. Both count tokens after the eviction only: a digit follows the step that evicts.

From the compressed prompt the prose then goes on, token by token, and the distribution over each
next token is compared with that of the exact cache: mean KL divergence in nats.

Prompts are read as in serving on a CPU. Methods that leave a prompt whole until it is complete
share one exact reading of it (`tape.py`). Bytes are those held after the prompt, floats counted as
16 bits.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from veloxquant.artifacts import InMemoryArtifactStore
from veloxquant.benchmarks.contenders import Report
from veloxquant.benchmarks.demo import load, model_folder
from veloxquant.benchmarks.finds import Find, line, targets
from veloxquant.benchmarks.keepers import EXACT, EXCUSED, Keeper, exact, filters_of, keepers
from veloxquant.benchmarks.needles import FORMS, haystack
from veloxquant.benchmarks.quality import Sheet, note
from veloxquant.benchmarks.questions import Questions, side_by_side, step
from veloxquant.benchmarks.reading import Reading
from veloxquant.benchmarks.rivals import held_bytes
from veloxquant.benchmarks.tape import Together
from veloxquant.benchmarks.text import prose
from veloxquant.cache.hook import attach
from veloxquant.cache.probe import probe
from veloxquant.cache.repetition import compress
from veloxquant.cache.residual import watch
from veloxquant.cache.residual_sites import sites_of


@dataclass(frozen=True)
class Size:
    """One length of prompt.

    Attributes:
        prompt: tokens.
        needles: facts in each text.
        haystacks: texts.
        steps: tokens after the prompt that KL is the mean of.
        shares: of the prompt's tokens that may stay.
        without: keepers that would take too long.
    """

    prompt: int
    needles: int
    haystacks: int
    steps: int
    shares: tuple[float, ...]
    without: tuple[str, ...] = ()


FULL = (
    Size(1025, 12, 1, 64, (0.5, 0.25)),
    # The noise of keyformer alone, a number for each pair of tokens and head, takes many minutes.
    Size(4097, 6, 1, 32, (0.25,), without=("keyformer", "random, always")),
)
"""Whole chunks and one token: what is left of a chunk would be scored again for every question."""
QUICK = (Size(513, 4, 1, 16, (0.25,)),)
CALIBRATION = 2048
"""Tokens at the end of the text, beyond all haystacks, that filters are measured on."""


@dataclass
class Entry:
    """A keeper at one share, and what was found of it."""

    keeper: Keeper
    share: float
    find: Find
    complete: list[Any] = field(default_factory=list)
    """Caches after the prompt, kept for the prose that follows."""


def repeated(reading: Reading, tokenizer: Any, keepers: Sequence[Keeper]) -> list[list[Any]]:
    """Caches that gave up rows after the model repeated the prompt to all of them."""
    made = [reading.begin(keeper) for keeper in keepers]
    together = [Together(caches) for caches in zip(*made, strict=True)]
    compress(reading.model, together, together, reading.before, tokenizer)
    return made


def measure(reading: Reading, entries: Sequence[Entry], tokenizer: Any, report: Report) -> None:
    """Put all questions to all entries, and leave their caches after the prompt in them."""
    again = [e for e in entries if e.keeper.reads == "repeat"]
    begun: dict[int, list[Any]] = {}
    if again:
        made = repeated(reading, tokenizer, [e.keeper for e in again])
        begun = {id(e): caches for e, caches in zip(again, made, strict=True)}
        report(f"T={len(reading.before) + 1}: the model has repeated the prompt")
    questions = Questions(reading.model)
    for entry in entries:
        keeper, find = entry.keeper, entry.find
        caches = begun.pop(id(entry), None)
        if caches is None:
            caches = reading.begin(keeper)
            reading.ask_in_window(keeper, caches, questions, find.window)
        reading.complete(keeper, caches)
        find.nbytes = sum(held_bytes(cache) for cache in caches)
        reading.ask_unknown(caches, questions, find.unknown)
        entry.complete = caches
        report(f"T={find.prompt}: {find.name} at {find.share:.0%} has read")
    questions.answer()
    for entry in entries:
        report(line(entry.find))


def follow(reading: Reading, entries: Sequence[Entry], steps: int) -> None:
    """Let the prose go on after the prompt, and compare with the first entry, the exact one."""
    sheets = [Sheet() for _ in entries]
    layers = side_by_side([entry.complete for entry in entries])
    for token, then in pairwise(reading.hay.following[: steps + 1]):
        note(sheets, step(reading.model, layers, [token] * len(entries)), then)
    for entry, sheet in zip(entries, sheets, strict=True):
        kl = np.array(sheet.kl)
        entry.find.kl = float(kl.mean())
        entry.find.kl_error = float(kl.std() / math.sqrt(kl.size))
        entry.find.same_top = float(np.mean(sheet.same))
        entry.complete = []


def entries_of(model: Any, size: Size, filters: InMemoryArtifactStore | None) -> list[Entry]:
    """Everything that is measured at a length, the exact cache first."""
    field = [(exact(model), 1.0)]
    field += [(k, s) for s in size.shares for k in keepers(model, size.prompt, s, filters)]
    return [Entry(k, share, Find(k.name, k.kind, share, size.prompt)) for k, share in field]


def _length(
    model: Any, tokenizers: tuple[Any, Any], size: Size, entries: Sequence[Entry], report: Report
) -> list[Find]:
    """Everything at one length; the prose goes on after the last text."""
    reading: Reading | None = None
    for number in range(size.haystacks):
        hay = haystack(
            tokenizers[0], prose(), size.prompt, forms=FORMS[: size.needles],
            following=size.steps + 1, skip=number * size.prompt, seed=number,
        )  # fmt: skip
        reading = Reading(model, hay, len(model.layers))
        report(f"T={size.prompt}: text {number + 1} of {size.haystacks} read")
        measure(reading, entries, tokenizers[1], report)
    assert reading is not None, "a size has a text"
    follow(reading, entries, size.steps)
    return [entry.find for entry in entries]


def run(
    *,
    quick: bool = False,
    sizes: Sequence[Size] = (),
    names: Sequence[str] = (),
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Measure every method that gives up tokens; plain data: sizes, finds, targets.

    Args:
        quick: one short prompt, few facts, one budget, and qfilters without a calibration.
        sizes: lengths, if not the usual ones.
        names: of `Keeper`s to measure beside the exact cache; all when empty.
        report: gets a line for each measurement.

    Raises:
        ModelMissingError: when the demo model is not there.
    """
    from mlx_lm.utils import load_tokenizer  # loads transformers: only when used

    sizes = sizes or (QUICK if quick else FULL)
    model, tokenizer = load()
    chat = load_tokenizer(model_folder())
    attach()
    text, plan = prose(), probe(model)
    # Layers show the exact reading how attention changes the stream, as long as this is held.
    watched = watch([*sites_of(plan).values()])
    filters = None
    if not quick:
        ids = tokenizer.encode(text).ids
        filters = filters_of(plan, ids[-CALIBRATION:])
        report(f"filters of qfilters measured on the last {CALIBRATION} tokens of the text")
    finds: list[Find] = []
    for size in sizes:
        entries = entries_of(model, size, filters)
        wanted = {*(names or [e.keeper.name for e in entries]), EXACT} - {*size.without}
        entries = [e for e in entries if e.keeper.name in wanted]
        finds += _length(model, (tokenizer, chat), size, entries, report)
    del watched
    return {
        "sizes": [asdict(size) for size in sizes],
        "calibrated": filters is not None,
        "finds": [asdict(find) for find in finds],
        "targets": targets(finds, EXCUSED),
    }
