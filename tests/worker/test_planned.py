"""What is planned before a start against what the gauge shows after it, in a real engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from veloxquant.cache.table import TABLE
from veloxquant.planning.fit import Sizer
from veloxquant.planning.method_settings import config_of
from veloxquant.planning.model_shape import read_shape

PROMPT, ANSWER = 600, 60
CLOSE = 0.05
"""How near the gauge comes to the plan (the promise); most methods meet it to the byte."""
KINDS = [
    ("fp16", {}),
    ("kvquant", {}),
    ("snapkv", {"eviction_storage": "affine4", "snap_budget": 256}),
    ("tova", {"tova_budget": 256}),
    ("xquant", {}),
]
BOUNDS_ONLY = {"svdq", "palu", "xkv", "squeeze", "streaming_llm", "qfilters"}
"""Planned as a bound: ranks and budgets of layers follow the data, a window that moves holds up to
a step more, and the queries of a short prompt take more than the rows of a long one."""
WAITS = {"knorm"}
"""Between two steps these hold one row more than after the next token."""


def claims(bench: Any) -> tuple[list[int], list[int]]:
    """Bytes that the caches claim after each step: while the prompt is read, and afterwards."""
    reading: list[int] = []
    seen: list[int] = []

    def note(jobs: list[Any], gauges: Any) -> None:
        if jobs:
            (seen if jobs[0].output_tokens > 1 else reading).append(gauges.kv_claimed)

    bench.after_each_step(note)
    return reading, seen


def planned_as_held(bench: Any, path: Path, method: str, options: dict[str, Any]) -> None:
    """The most bytes of a conversation and those at its end, as planned."""
    shape = read_shape(path)
    config = config_of(method, options, shape.layers[0][0].k_dim)
    reading, seen = claims(bench)
    prompt = bench.serving.tokenizer.encode("The river runs down to the sea at last. ") * PROMPT
    bench.submit(prompt[:PROMPT], ANSWER).text()
    need = Sizer(shape, config, ANSWER).need(PROMPT + ANSWER)
    assert len(seen) > ANSWER // 2
    assert len(reading) > 2
    assert max(reading) <= need.prompt_kv
    assert max(seen) <= need.kv
    if method in WAITS:
        assert max(seen) == pytest.approx(need.kv, rel=CLOSE)
    elif method not in BOUNDS_ONLY:
        assert seen[-1] == pytest.approx(need.kv_end, rel=CLOSE)


@pytest.mark.parametrize(("method", "options"), KINDS, ids=[kind[0] for kind in KINDS])
def test_an_answer_takes_what_was_planned(
    make_bench: Callable[..., Any], tiny: Path, method: str, options: dict[str, Any]
) -> None:
    bench = make_bench(method=method, options=options, context=1024, batch=1)
    planned_as_held(bench, tiny, method, options)


@pytest.mark.slow
@pytest.mark.parametrize("method", [row.name for row in TABLE.values() if row.is_ready])
def test_an_answer_of_every_method_takes_what_was_planned(
    make_bench: Callable[..., Any], tiny: Path, method: str
) -> None:
    assert mx.default_device() == mx.cpu, "on a GPU rows have the model's type"
    planned_as_held(make_bench(method=method, context=1024, batch=1), tiny, method, {})
