"""Parts of mlx-lm's batch generator, used directly; whole runs: contracts/test_batching.py."""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import READY, small_config

from tests.architectures import feed, prompt, tiny, uncompiled
from veloxquant.cache.batch import RowBatch
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.table import MethodRow, row_of
from veloxquant.core.exceptions import CacheStateError

STEP = 16
PROMPTS = [prompt(70, 1), prompt(41, 2), prompt(54, 3)]


@pytest.fixture(autouse=True)
def plain_graphs() -> Iterator[None]:
    with uncompiled():
        yield


def prompt_batch(model: Any, caches: list[list[Any]]) -> Any:
    import mlx_lm.generate  # noqa: F401 - the attribute of that name is a function

    kind = sys.modules["mlx_lm.generate"].PromptProcessingBatch
    uids = list(range(len(caches)))
    return kind(model, uids, caches, prefill_step_size=STEP, samplers=[None] * len(uids),
                logits_processors=[[]] * len(uids), max_tokens=[4] * len(uids))  # fmt: skip


def generated(batch: Any) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {uid: [] for uid in batch.uids}
    while batch.uids:
        for answer in batch.next():
            out[answer.uid].append(answer.token)
    return out


def alone(model: Any, caches: list[Any], tokens: list[int]) -> list[int]:
    """Four greedy tokens after a prompt fed as the batch feeds it."""
    body = tokens[:-1]
    for start in range(0, len(body), STEP):
        feed(model, body[start : start + STEP], caches)
    out, token = [], tokens[-1]
    for _ in range(4):
        token = int(mx.argmax(feed(model, [token], caches)[-1]).item())
        out.append(token)
    return out


@pytest.mark.parametrize("row", READY, ids=lambda row: row.name)
def test_padded_prompts_in_one_call_and_a_batch_split_in_two(row: MethodRow) -> None:
    model, config = tiny("llama"), small_config(row)
    plan = plan_model(model, config)
    batch = prompt_batch(model, [new_caches(plan, config) for _ in PROMPTS])
    batch.prompt([tokens[:-1] for tokens in PROMPTS])
    for cache in batch.prompt_cache:
        assert cache.offset.tolist() == [len(tokens) - 1 for tokens in PROMPTS]
    parted = batch.split([0, 2])
    got = generated(parted.generate([[PROMPTS[0][-1]], [PROMPTS[2][-1]]]))
    got |= generated(batch.generate([[PROMPTS[1][-1]]]))
    for i, tokens in enumerate(PROMPTS):
        assert got[i] == alone(model, new_caches(plan, config), tokens), i


def fed(batch: RowBatch, length: int) -> mx.array:
    """Ones through a batch; the sizes of its rows afterwards are what counts."""
    rows = mx.ones((len(batch), 2, length, 64))
    keys, values = batch.update_and_fetch(rows, rows)
    return keys.attend(rows, values, 1.0, "causal")


def row_batch(n: int) -> RowBatch:
    config = small_config(row_of("kivi"))
    plan = plan_model(tiny("llama"), config)
    return new_caches(plan, config)[0].merge([new_caches(plan, config)[0] for _ in range(n)])


def test_a_copy_in_mid_prompt_knows_what_is_padding() -> None:
    batch = row_batch(2)
    batch.prepare(lengths=[5, 3], right_padding=[0, 2])
    fed(batch, 2)
    twin = copy.deepcopy(batch)
    out = fed(twin, 3)
    assert [row.offset for row in twin.rows] == [5, 3]
    # Padded queries give zeros, real ones the mean of ones.
    assert mx.array_equal(out[1, :, 1:], mx.zeros((2, 2, 64))).item()
    assert mx.allclose(out[1, :, :1], mx.ones((2, 1, 64)), atol=1e-5).item()


def test_after_the_prompt_every_token_counts() -> None:
    batch = row_batch(2)
    batch.prepare(lengths=[5, 3], right_padding=[0, 2])
    fed(batch, 5)
    batch.finalize()
    fed(batch, 1)
    assert batch.offset.tolist() == [6, 4]


def test_rows_are_filtered_in_the_order_given_and_extended() -> None:
    batch, other = row_batch(3), row_batch(1)
    a, b, c = batch.rows
    batch.filter(mx.array([2, 0]))
    assert batch.rows == [c, a]
    batch.extend(other)
    assert batch.rows == [c, a, *other.rows]
    batch.filter([1])
    assert batch.rows == [a]
    assert b not in batch.rows


def test_what_does_not_fit_a_batch_is_refused() -> None:
    batch = row_batch(2)
    with pytest.raises(CacheStateError, match="pad them on the right"):
        batch.prepare(left_padding=[1, 0])
    with pytest.raises(CacheStateError, match="3 rows were fed to a batch of 2"):
        batch.update_and_fetch(mx.ones((3, 2, 1, 64)), mx.ones((3, 2, 1, 64)))
    rows = mx.ones((2, 2, 1, 64))
    keys, values = batch.update_and_fetch(rows, rows)
    batch.filter([0])
    with pytest.raises(CacheStateError, match="changed since"):
        keys.attend(rows, values, 1.0, None)
