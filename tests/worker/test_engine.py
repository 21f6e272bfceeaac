import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from veloxquant.supervisor.messages import Request
from veloxquant.worker.admission import MAX_WAITING
from veloxquant.worker.jobs import Failure, Refused, Sampling
from veloxquant.worker.meter import Reading

PROMPTS = (
    "The river runs",
    "A number of people asked the server many short questions at the same time.",
    "Compression",
    "One two three four five six seven eight nine ten",
)


def test_four_requests_at_once_give_the_tokens_each_gives_alone(bench: Any) -> None:
    alone = [bench.submit(prompt, 16).text() for prompt in PROMPTS]
    together = [bench.submit(prompt, 16) for prompt in PROMPTS]
    assert [asked.text() for asked in together] == alone
    assert len(set(alone)) == len(alone)
    assert all(asked.last.finish == "length" for asked in together)


@pytest.mark.parametrize("method", ["turboquant_rvq", "kivi", "streaming_llm", "snapkv"])
def test_compressed_methods_answer_in_a_batch(make_bench: Callable[..., Any], method: str) -> None:
    bench = make_bench(method=method, batch=2)
    asked = [bench.submit(prompt, 8) for prompt in PROMPTS]
    assert all(one.text() for one in asked)
    assert bench.telemetry.totals.done == len(PROMPTS)


def test_a_prompt_in_many_chunks_gives_the_same_answer(make_bench: Callable[..., Any]) -> None:
    prompt = " ".join(PROMPTS)
    whole = make_bench(batch=1).submit(prompt).text()
    assert make_bench(batch=1, prefill_step=32).submit(prompt).text() == whole


def test_a_stop_string_ends_the_answer_and_is_not_shown(bench: Any) -> None:
    text = bench.submit(PROMPTS[0], 40).text()
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    asked = bench.submit(PROMPTS[0], 40, stop=(stop,))
    assert asked.text() == text[: text.index(stop)]
    assert asked.last.finish == "stop"
    assert asked.job.output_tokens < 40


def test_a_seed_repeats_the_answer_whoever_else_is_served(bench: Any) -> None:
    sampling = Sampling(temperature=1.5, top_p=0.95, top_k=50, min_p=0.001, seed=7)
    alone = bench.submit(PROMPTS[0], 20, sampling=sampling).text()
    busy = bench.submit(PROMPTS[1], 40, sampling=Sampling(temperature=1.0))
    assert bench.submit(PROMPTS[0], 20, sampling=sampling).text() == alone
    other = Sampling(temperature=1.5, top_p=0.95, top_k=50, min_p=0.001, seed=8)
    assert bench.submit(PROMPTS[0], 20, sampling=other).text() != alone
    busy.text()


def test_logprobs_name_the_chosen_token_first_when_greedy(bench: Any) -> None:
    asked = bench.submit(PROMPTS[0], 4, top_logprobs=3)
    entries = []
    while asked.last is None:
        entries += asked.next().logprobs
    assert len(entries) == 4
    for entry in entries:
        assert [entry.token, entry.logprob] == list(entry.top[0])
        assert sorted((value for _, value in entry.top), reverse=True) == [v for _, v in entry.top]


def test_a_bias_forbids_and_a_penalty_changes(bench: Any) -> None:
    first = bench.submit(PROMPTS[0], 1, top_logprobs=0).next().logprobs[0].token
    forbid = Sampling(temperature=0, logit_bias=((first, -100.0),))
    second = bench.submit(PROMPTS[0], 1, top_logprobs=0, sampling=forbid).next().logprobs[0].token
    assert second != first
    loop = bench.submit(PROMPTS[0], 60).text()
    penalty = Sampling(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert bench.submit(PROMPTS[0], 60, sampling=penalty).text() != loop


def test_cancel_frees_row_and_blocks_within_one_step(bench: Any, gate_step: Any) -> None:
    asked = bench.submit(PROMPTS[0], 400)
    gate_step.set()
    asked.next()
    gate_step.clear()
    bench.engine.cancel(asked.job.id)
    step = bench.telemetry.step
    gate_step.set()
    assert asked.text() is not None
    assert asked.last.cancelled
    assert bench.telemetry.step <= step + 1
    assert bench.engine.wait_idle(5)
    assert bench.admission.pool.stats.blocks_in_use() == 0
    assert bench.telemetry.totals.cancelled == 1


def test_a_waiting_request_can_be_cancelled(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(batch=1)
    running = bench.submit(PROMPTS[0], 300)
    waiting = bench.submit(PROMPTS[1], 4)
    bench.engine.cancel(waiting.job.id, Failure(499, "cancelled", "by the operator"))
    assert waiting.text() == ""
    assert waiting.last.failure.message == "by the operator"
    bench.engine.cancel(running.job.id)


def test_the_queue_is_bounded_and_says_so(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(batch=1, context=128)
    first = bench.submit(PROMPTS[0], 100)
    first.next()
    waiting = [bench.submit(PROMPTS[0], 1) for _ in range(MAX_WAITING)]
    with pytest.raises(Refused) as refused:
        bench.submit(PROMPTS[0], 1)
    assert refused.value.failure.status == 503
    assert refused.value.retry_after
    bench.engine.cancel(first.job.id)
    assert all(asked.text() is not None for asked in waiting)
    assert bench.telemetry.totals.refused == 1


def test_a_forward_pass_that_raises_fails_its_rows_and_the_engine_lives(bench: Any) -> None:
    good = bench.submit(PROMPTS[0]).text()
    batch = bench.engine._batch
    real_step = batch.step

    def step() -> Any:
        if len(bench.engine._rows) < 2:
            return real_step()
        raise RuntimeError("no memory for a buffer")

    batch.step = step
    asked = [bench.submit(prompt, 400) for prompt in PROMPTS[:2]]
    for one in asked:
        one.text()
        assert one.last.failure.status == 500
        assert "no memory for a buffer" in one.last.failure.message
    assert bench.submit(PROMPTS[0]).text() == good
    assert bench.engine._batch is not batch
    assert bench.admission.pool.stats.blocks_in_use() == 0


def test_a_row_that_cannot_be_charged_fails_alone(bench: Any) -> None:
    pool = bench.admission.pool
    other = bench.submit(PROMPTS[2], 30)
    other.next()
    thief = pool.new_owner()
    pool.allocate("kv", pool.n_free() * 16 - 3 * 16, thief)
    starved = bench.submit(PROMPTS[1], 200)
    starved.text()
    assert starved.last.failure.code == "out_of_blocks"
    pool.free_all(thief)
    other.text()
    assert other.last.finish == "length"


def test_beyond_the_hard_line_the_largest_request_goes(bench: Any, gate_step: Any) -> None:
    large, small = bench.submit(PROMPTS[1], 300), bench.submit(PROMPTS[2], 300)
    gate_step.set()
    large.next(), small.next()
    bench.meter.read = lambda: Reading(bench.meter.limit + 1, 0, 0, 0)
    large.text()
    assert large.last.failure.code == "out_of_memory"
    small.text()
    with pytest.raises(Refused, match="Memory"):
        bench.submit(PROMPTS[0])


def test_claimed_walked_and_measured_bytes_agree(make_bench: Callable[..., Any]) -> None:
    for method in ("fp16", "turboquant_rvq", "kivi"):
        bench = make_bench(method=method, context=1024, batch=2, prefill_step=128)
        asked = [bench.submit(" ".join(PROMPTS * 8), 100) for _ in range(2)]
        for one in asked:
            one.next()
        counts = bench.engine.audit().result(10)
        share, more = (0.001, 1 << 10) if mx.default_device() == mx.cpu else (0.05, 64 << 10)
        slack = share * counts["claimed"] + more
        assert counts["claimed"] > 50_000, method
        assert abs(counts["walked"] - counts["claimed"]) <= slack, (method, counts)
        assert abs(counts["resident"] - counts["claimed"]) <= slack, (method, counts)
        for one in asked:
            bench.engine.cancel(one.job.id)
        bench.close()


def test_a_model_beyond_the_limit_does_not_fit(make_bench: Callable[..., Any]) -> None:
    fault = make_bench(limit=1 << 20).serving
    assert fault.code == "does_not_fit"
    assert "1,048,576" in fault.detail


def test_drain_refuses_new_requests_and_finishes_the_old(bench: Any) -> None:
    asked = bench.submit(PROMPTS[0], 60)
    bench.engine.drain(Failure(503, "stopping", "The server is stopping."))
    with pytest.raises(Refused, match="stopping"):
        bench.submit(PROMPTS[1])
    assert bench.engine.wait_idle(20)
    asked.text()
    assert asked.last.finish == "length"


def test_stopping_gives_every_request_a_last_word(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(batch=1)
    asked = [bench.submit(PROMPTS[0], 400) for _ in range(3)]
    asked[0].next()
    bench.close()
    for one in asked:
        one.text()
        assert one.last.failure.code == "stopping"
    assert not bench.engine.is_alive()


def test_the_wired_limit_is_never_touched(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    module = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: called.append("set"))
    monkeypatch.setattr(
        module, "maybe_set_recommended_wired_limit", lambda: called.append("recommended")
    )
    bench = make_bench(batch=2)
    bench.submit(PROMPTS[0]).text()
    bench.close()
    assert called == []


def test_messages_follow_a_request_and_hold_no_text(bench: Any) -> None:
    asked = bench.submit("a very secret prompt", 5)
    text = asked.text()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(bench.engine.wait_idle, 5).result()
    states = [m.state for m in bench.sent if isinstance(m, Request)]
    assert states == ["queued", "prefill", "decode", "done"]
    last = [m for m in bench.sent if isinstance(m, Request)][-1]
    assert (last.output_tokens, last.finish) == (5, "length")
    assert last.ttft is not None
    assert last.ttft > 0
    dump = repr(bench.sent)
    assert "secret" not in dump
    assert text not in dump
