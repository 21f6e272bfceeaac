"""The retrieval benchmark: facts in prose, one reading for many caches, and what is asked."""

import copy
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_model import CORPUS, make_tiny_model
from tokenizers import Tokenizer

from veloxquant.benchmarks import report
from veloxquant.benchmarks.finds import Answers, Find, targets
from veloxquant.benchmarks.keepers import BUDGETS, Keeper, exact, keepers, rocket_ratio
from veloxquant.benchmarks.needles import haystack
from veloxquant.benchmarks.questions import Questions, advance, step
from veloxquant.benchmarks.reading import Reading
from veloxquant.benchmarks.retrieval import Entry, follow, measure
from veloxquant.cache.hook import attach
from veloxquant.cache.probe import probe
from veloxquant.cache.residual import watch
from veloxquant.cache.residual_sites import sites_of
from veloxquant.cache.table import TABLE
from veloxquant.quantizers.specs.pages import split_compression_ratio

TEXT = " ".join(CORPUS) * 40
FORMS = ("The fox jumps at", "The sea runs to", "The dog asked for")
PROMPT = 321
SHARE = 0.25
EVICTING = [row.name for row in TABLE.values() if row.trim == "until_evicted"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    attach()
    return model


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def reading(model: Any, tokenizer: Tokenizer) -> Reading:
    watched = watch([*sites_of(probe(model)).values()])
    hay = haystack(tokenizer, TEXT, PROMPT, forms=FORMS, following=8)
    made = Reading(model, hay, len(model.layers))
    del watched
    return made


def by_name(model: Any) -> dict[str, Keeper]:
    return {keeper.name: keeper for keeper in keepers(model, PROMPT, SHARE, None)}


# ---- facts ----------------------------------------------------------------------------------


def test_facts_lie_in_the_text_where_sentences_end(tokenizer: Tokenizer) -> None:
    hay = haystack(tokenizer, TEXT, PROMPT, forms=FORMS, following=9, seed=3)
    assert len(hay.tokens) == PROMPT
    assert len(hay.following) == 9
    text = tokenizer.decode(hay.tokens)
    places = [needle.place for needle in hay.needles]
    assert places == sorted(places)
    for needle in hay.needles:
        fact = [*needle.question, *needle.answer]
        assert hay.tokens[needle.place : needle.place + len(fact)] == fact
        sentence = tokenizer.decode(fact) + "."
        assert sentence in text
        assert text[: text.index(sentence)].endswith(".")
        assert sentence[-6:-1].isdigit()
    # Nothing of the prose is lost or repeated, and it goes on where the prompt stops.
    prose = text + tokenizer.decode(hay.following)
    for needle in hay.needles:
        prose = prose.replace(tokenizer.decode([*needle.question, *needle.answer]) + ".", "")
    assert TEXT.startswith(prose)


def test_facts_are_spread_over_the_text_and_drawn_from_the_seed(tokenizer: Tokenizer) -> None:
    first, again, other = (
        haystack(tokenizer, TEXT, PROMPT, forms=FORMS, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.tokens != other.tokens
    depths = [needle.place / PROMPT for needle in first.needles]
    assert depths[0] < 0.25
    assert depths[-1] > 0.6
    with pytest.raises(ValueError, match="do not fit"):
        haystack(tokenizer, TEXT, 20, forms=FORMS)
    with pytest.raises(ValueError, match="ends of sentences"):
        haystack(tokenizer, "word " * 200, 120, forms=FORMS)


# ---- keepers --------------------------------------------------------------------------------


def test_every_evicting_method_is_measured(model: Any) -> None:
    assert set(BUDGETS) == set(EVICTING)
    found = by_name(model)
    assert {keeper.method for keeper in found.values() if keeper.method} == set(EVICTING)
    assert {"kvzip context", "kvzip reconstruct"} <= set(found)


@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
def test_rocketkv_gets_the_ratio_that_keeps_the_share(share: float) -> None:
    assert math.isclose(split_compression_ratio(rocket_ratio(share))[0], 1 / share)


@pytest.mark.parametrize("name", ["random", "random, always", *EVICTING])
def test_budgets_hold_after_the_prompt(name: str, model: Any, reading: Reading) -> None:
    name = "kvzip context" if name == "kvzip" else name
    keeper = by_name(model)[name]
    caches = reading.begin(keeper)
    reading.complete(keeper, caches)
    rows = np.mean([np.array(cache.rows) for cache in caches])
    budget = round(SHARE * PROMPT)
    # chunkkv drops whole runs of eight tokens; rocketkv rounds down.
    assert budget - 8 <= rows <= budget


# ---- the tape -------------------------------------------------------------------------------


def read_through_the_model(reading: Reading, keeper: Keeper) -> list[Any]:
    caches = keeper.make()
    for start in range(0, len(reading.before), 256):
        advance(reading.model, caches, [reading.before[start : start + 256]])
    return caches


TAPED = ["random", "snapkv", "squeeze", "h2o", "keyformer", "cam", "nestedkv", "rocketkv"]


@pytest.mark.parametrize("name", TAPED)
def test_a_tape_brings_caches_where_the_model_does(name: str, model: Any, reading: Reading) -> None:
    keeper = by_name(model)[name]
    assert keeper.reads == "tape"
    watched = watch([*sites_of(probe(model)).values()])
    plain, taped = read_through_the_model(reading, keeper), reading.begin(keeper)
    step(model, plain, [reading.last])
    del watched
    reading.complete(keeper, taped)
    for a, b in zip(plain, taped, strict=True):
        a.commit()
        assert (a.rows, a.offset) == (b.rows, b.offset)
        if hasattr(a, "kept_positions"):
            assert mx.array_equal(a.kept_positions(), b.kept_positions())
        assert a.fidelity == b.fidelity == "exact"
    after = [step(model, caches, [5]) for caches in (plain, taped)]
    np.testing.assert_allclose(np.array(after[0]), np.array(after[1]), atol=1e-4)


def test_questions_in_the_window_and_unknown_are_those_of_plain_runs(
    model: Any, reading: Reading
) -> None:
    keeper = by_name(model)["snapkv"]
    needle = reading.hay.needles[1]
    begun = reading.begin(keeper)
    window, unknown = Answers(), Answers()
    questions = Questions(model)
    reading.ask_in_window(keeper, begun, questions, window)
    reading.complete(keeper, begun)
    reading.ask_unknown(begun, questions, unknown)
    questions.answer()

    def alone(lead: list[int], caches: list[Any]) -> float:
        advance(model, caches, [lead])
        heard = [step(model, caches, [token])[0] for token in (needle.question[-1], *needle.answer)]
        return float(np.mean([heard[i][t].item() for i, t in enumerate(needle.answer)][1:]))

    in_window = alone(reading.lead(needle), read_through_the_model(reading, keeper))
    later = read_through_the_model(reading, keeper)
    step(model, later, [reading.last])
    afterwards = alone(needle.question[:-1], later)
    assert window.logp[1] == pytest.approx(in_window, abs=1e-3)
    assert unknown.logp[1] == pytest.approx(afterwards, abs=1e-3)
    assert in_window != pytest.approx(afterwards, abs=1e-2), "the protocols are alike here"


def test_rows_that_wait_are_answered_in_the_order_they_came(model: Any, reading: Reading) -> None:
    caches = reading.begin(exact(model))
    reading.complete(exact(model), caches)
    needles = reading.hay.needles
    together, alone = Answers(), Answers()
    questions = Questions(model, room=1 << 40)
    for needle in needles:
        questions.put(copy.deepcopy(caches), needle, together, lead=needle.question[:-1])
    assert not together.found
    questions.answer()
    one_by_one = Questions(model, room=1)
    for needle in needles:
        one_by_one.put(copy.deepcopy(caches), needle, alone, lead=needle.question[:-1])
    assert together.found == alone.found
    assert together.logp == pytest.approx(alone.logp, abs=1e-3)
    assert caches[0].offset == PROMPT


def test_all_is_measured_and_the_prose_goes_on(folder: Path, model: Any, reading: Reading) -> None:
    from mlx_lm.utils import load_tokenizer

    chosen = [exact(model), *(by_name(model)[n] for n in ("random", "kvzip reconstruct"))]
    entries = [Entry(k, SHARE, Find(k.name, k.kind, SHARE, PROMPT)) for k in chosen]
    said: list[str] = []
    measure(reading, entries, load_tokenizer(folder), said.append)
    follow(reading, entries, steps=6)
    whole, lot, repeated = (entry.find for entry in entries)
    assert [len(f.unknown.found) for f in (whole, lot, repeated)] == [3, 3, 3]
    assert [len(f.window.found) for f in (whole, lot, repeated)] == [3, 3, 0]
    assert whole.kl == 0
    assert min(lot.kl, repeated.kl) > 0
    assert max(lot.nbytes, repeated.nbytes) < whole.nbytes
    assert any("random" in text and "unknown" in text for text in said)


def test_a_repetition_serves_two_budgets_as_it_serves_each(
    folder: Path, model: Any, reading: Reading
) -> None:
    from mlx_lm.utils import load_tokenizer

    from veloxquant.benchmarks.retrieval import repeated
    from veloxquant.methods.kvzip import kvzip_compress

    tokenizer = load_tokenizer(folder)
    pair = [
        {k.name: k for k in keepers(model, PROMPT, share, None)}["kvzip reconstruct"]
        for share in (0.5, 0.25)
    ]
    for keeper, together in zip(pair, repeated(reading, tokenizer, pair), strict=True):
        alone = read_through_the_model(reading, keeper)
        kvzip_compress(model, alone, reading.before, tokenizer)
        for a, b in zip(alone, together, strict=True):
            assert (a.rows, a.fidelity) == (b.rows, "exact")
            assert mx.array_equal(a.kept_positions(), b.kept_positions())


# ---- judging --------------------------------------------------------------------------------


def test_an_answer_is_found_when_every_token_of_it_is_the_likeliest() -> None:
    sure = np.log(np.full(4, 0.1)) + np.eye(4)[2] * math.log(7)  # 0.7 for token 2
    answers = Answers()
    answers.add([sure, sure, sure], [2, 2, 2])
    answers.add([sure, sure, sure], [2, 2, 1])
    answers.add([sure, sure, sure], [1, 2, 2])
    assert answers.found == [True, False, False]
    # The first token parts the answer from the question: its probability does not count.
    assert answers.logp == pytest.approx(
        [math.log(0.7), (math.log(0.7) + math.log(0.1)) / 2, math.log(0.7)]
    )


def find(name: str, window: list[float], unknown: list[float], share: float = 0.5) -> Find:
    found = Find(name, "ours", share, 64, nbytes=2**20, kl=0.25, kl_error=0.01)
    found.window = Answers([logp > -1 for logp in window], window)
    found.unknown = Answers([logp > -1 for logp in unknown], unknown)
    return found


def test_targets_are_leads_over_the_same_questions() -> None:
    finds = [
        find("random", [-2.0, -3.0], [-2.0, -3.0]),
        find("streaming_llm", [-3.0, -3.0], [-3.0, -3.0]),
        find("snapkv", [-0.5, -3.5], [-3.0, -4.0]),
        find("h2o", [-2.5, -3.0], [-3.0, -4.0]),
        find("kvzip reconstruct", [], [-0.5, -0.5]),
        find("snapkv", [-0.1, -0.1], [-1.0, -1.0], 0.25),
        find("random", [-2.0, -3.0], [-2.0, -3.0], 0.25),
    ]
    asked = {t["name"]: t for t in targets(finds, {"h2o": "it looks at the past"})}
    assert asked["snapkv, question in the window"]["reached"] == pytest.approx(0.5)
    assert asked["snapkv, question in the window"]["holds"]
    assert asked["h2o, question in the window"]["reached"] == pytest.approx(-0.25)
    assert not asked["h2o, question in the window"]["judged"]
    assert asked["kvzip reconstruct, question unknown"]["reached"] == pytest.approx(3.0)
    assert len(asked) == 3


def test_the_table_has_a_line_for_every_find() -> None:
    from dataclasses import asdict

    finds = [find("snapkv", [-0.5, -1.5], [-2.0, -4.0]), find("kvzip reconstruct", [], [-0.5])]
    result = {
        "sizes": [{"prompt": 64, "needles": 2, "haystacks": 1, "steps": 8, "without": ["cam"]}],
        "calibrated": False,
        "finds": [asdict(f) for f in finds],
        "targets": targets(finds),
    }
    text = report.retrieval(result)
    assert "| snapkv | 50% | 1.00 | 50% | 0% | -1.00 | -3.00 | 0.2500 | 0.0100 |" in text
    assert "| kvzip reconstruct | 50% | 1.00 | – | 100% | – | -0.50 | 0.2500 | 0.0100 |" in text
    assert "without a calibration" in text
    assert "Prompt of 64 tokens, 1 x 2 questions" in text
    assert "Left out at this length for its time: cam." in text
