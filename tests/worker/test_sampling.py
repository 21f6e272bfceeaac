"""How the next token is chosen."""

import mlx.core as mx
import pytest

from veloxquant.worker.jobs import Sampling
from veloxquant.worker.sampling import make_sampler

LOGPROBS = mx.log(mx.array([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-30, 1e-6, 1e-4, 1e-3])
@pytest.mark.parametrize("seed", [None, 3])
def test_cold_takes_the_likeliest_however_cold(temperature: float, seed: int | None) -> None:
    sampler = make_sampler(Sampling(temperature=temperature, seed=seed), 3)
    assert sampler(LOGPROBS).tolist() == [2, 0]


def test_warm_takes_others_too() -> None:
    sampler = make_sampler(Sampling(temperature=1.0, seed=1), 3)
    drawn = [sampler(LOGPROBS[:1]).item() for _ in range(60)]
    assert set(drawn) == {0, 1, 2}
