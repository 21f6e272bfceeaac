import pytest

from veloxquant.worker.admission import MAX_WAITING, Admission, QueueFullError
from veloxquant.worker.jobs import Job


def job(name: str, prompt: int = 10, answer: int = 6) -> Job:
    return Job(name, [1] * prompt, answer, lambda _: None)


def start(admission: Admission, one: Job) -> Job:
    admission.offer(one)
    assert admission.start_next() is one
    return one


def test_no_more_run_than_the_pool_can_hold_to_the_end() -> None:
    admission = Admission(context=64, batch=2, block_size=16)  # eight blocks
    first = start(admission, job("a", 50, 14))
    second = start(admission, job("b", 50, 14))
    admission.offer(job("c", 1, 1))
    assert admission.start_next() is None
    admission.finish(first)
    assert admission.start_next() is not None
    admission.finish(second)
    assert admission.pool.stats.blocks_in_use() == 0


def test_the_queue_keeps_its_order_even_when_a_later_one_would_fit() -> None:
    admission = Admission(context=64, batch=4, block_size=16)  # sixteen blocks
    running = [start(admission, job(f"r{i}", 60, 4)) for i in range(3)]
    admission.offer(job("large", 60, 20))
    admission.offer(job("small", 1, 1))
    assert admission.start_next() is None
    admission.finish(running[0])
    assert admission.start_next().id == "large"  # type: ignore[union-attr]


def test_charges_follow_the_tokens_both_ways() -> None:
    admission = Admission(context=128, batch=1, block_size=16)
    one = start(admission, job("a", 60, 60))
    for held, more, blocks in ((0, 17, 2), (17, 1, 2), (32, 1, 3), (33, 64, 7), (20, 1, 2)):
        assert admission.charge(one, held, more)
        assert admission.pool.stats.blocks_in_use() == blocks
    cells = admission.cells()
    assert (cells.blocks, cells.used, cells.part) == (8, 2, 1)
    assert sum(count for count, _, _ in cells.cells) == 8
    assert [(count, state) for count, state, _ in cells.cells] == [(1, "#"), (1, "*"), (6, ".")]
    admission.finish(one)
    admission.finish(one)
    assert admission.running == 0


def test_a_dry_pool_is_told_and_changes_nothing() -> None:
    admission = Admission(context=32, batch=1, block_size=16)
    one = start(admission, job("a", 16, 16))
    admission.pool.allocate("kv", 16, owner=99)
    assert admission.charge(one, 0, 16)
    assert not admission.charge(one, 16, 1)
    assert admission.pool.stats.blocks_in_use() == 2


def test_waiting_is_bounded_and_can_be_left() -> None:
    admission = Admission(context=32, batch=1, block_size=16)
    for i in range(MAX_WAITING):
        admission.offer(job(str(i)))
    with pytest.raises(QueueFullError):
        admission.offer(job("late"))
    assert admission.withdraw("7").id == "7"  # type: ignore[union-attr]
    assert admission.withdraw("7") is None
    admission.offer(job("late"))
    assert admission.withdraw_first().id == "0"  # type: ignore[union-attr]
    assert admission.waiting == MAX_WAITING - 1
