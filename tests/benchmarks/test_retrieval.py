"""Facts found by evicting methods on the demo model: a minute or two, full run only."""

from typing import Any

import pytest

from veloxquant.benchmarks import retrieval
from veloxquant.benchmarks.demo import ModelMissingError, model_folder

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]
SIZE = retrieval.Size(prompt=513, needles=6, haystacks=1, steps=16, shares=(0.25,))
NAMES = ("random", "streaming_llm", "snapkv", "tova", "chunkkv", "kvzip reconstruct, model")


@pytest.fixture(scope="module")
def finds() -> Any:
    """What some methods found, by name."""
    try:
        model_folder()
    except ModelMissingError as error:
        pytest.skip(str(error))
    result = retrieval.run(quick=True, sizes=(SIZE,), names=NAMES)
    return {f["name"]: f for f in result["finds"]}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_exact_cache_finds_every_fact(finds: Any) -> None:
    exact = finds["fp16 (exact)"]
    assert all(exact["window"]["found"])
    assert all(exact["unknown"]["found"])
    assert exact["kl"] == 0


@pytest.mark.parametrize("name", ["snapkv", "tova", "chunkkv"])
def test_a_question_in_the_window_keeps_its_answer(finds: Any, name: str) -> None:
    mine = mean(finds[name]["window"]["logp"])
    for rival in ("random", "streaming_llm"):
        assert mine > mean(finds[rival]["window"]["logp"])
    assert mine > mean(finds[name]["unknown"]["logp"])


def test_a_repetition_keeps_answers_to_questions_nobody_knows(finds: Any) -> None:
    mine = finds["kvzip reconstruct, model"]["unknown"]
    assert mean(mine["found"]) > 0.5
    assert mean(mine["logp"]) > 1 + mean(finds["snapkv"]["unknown"]["logp"])
