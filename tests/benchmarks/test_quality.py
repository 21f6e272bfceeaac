"""Quality at equal bytes on the demo model: minutes, so part of the full run only."""

from typing import Any

import pytest

from veloxquant.benchmarks import quality
from veloxquant.benchmarks.demo import ModelMissingError, model_folder

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def result() -> Any:
    """One quick run for all tests here."""
    try:
        model_folder()
    except ModelMissingError as error:
        pytest.skip(str(error))
    return quality.run(quick=True)


def test_ours_is_not_worse_than_its_rival_at_equal_bytes(result: Any) -> None:
    assert len(result["verdicts"]) >= 5
    assert not [v for v in result["verdicts"] if not v["holds"]]


def test_more_bits_say_more_of_the_same(result: Any) -> None:
    by_name = {o["name"]: o for o in result["outcomes"]}
    two, four = by_name["kivi 2 bit"], by_name["kivi 4 bit"]
    assert four["kl"] < two["kl"] / 4
    assert four["same_top"] > 0.9
    assert two["nbytes"] < four["nbytes"] < by_name["fp16 (exact)"]["nbytes"] / 2
