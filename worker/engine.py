"""The engine: one thread that owns model and arrays and moves every request one step at a time.

Others talk to it through `submit`, `cancel` and `call`; it answers by `Job.emit`. Nothing a
request does can end the thread: a row that cannot be charged fails alone, and when a forward
pass raises, its rows fail, the batch is built anew and the engine goes on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import make_text_state_machine

from veloxquant.supervisor.messages import Message
from veloxquant.worker.admission import RETRY_SECONDS, Admission, QueueFullError
from veloxquant.worker.audit import audit
from veloxquant.worker.batch import Batch, Token
from veloxquant.worker.faults import WorkerFault
from veloxquant.worker.gauges import look
from veloxquant.worker.jobs import Delta, Failure, Finish, Job, Refused, TokenLogprob
from veloxquant.worker.ledger import Ledger
from veloxquant.worker.meter import Meter, Reading
from veloxquant.worker.sampling import top_of
from veloxquant.worker.startup import Serving
from veloxquant.worker.telemetry import Telemetry
from veloxquant.worker.text import Answer

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.25
_IDLE_SECONDS = 0.25
_TIGHT = Failure(503, "out_of_memory", "Memory is nearly used up; try again shortly.")
_OUT_OF_MEMORY = Failure(503, "out_of_memory", "The server ran out of memory.")
_STOPPING = Failure(503, "stopping", "The server is stopping.")


class Engine(threading.Thread):
    """Runs `prepare`, then serves until told to stop.

    Args:
        prepare: loads the model on this thread.
        admission: queue and pool.
        telemetry: totals and gauges, filled here.
        meter: memory and its limit.
        send: takes messages for the supervisor; must not block.
        on_ready: called on this thread when the first request can come.
        on_fault: called on this thread when preparing failed, or the thread ends by a fault.
    """

    def __init__(
        self,
        prepare: Callable[[], Serving],
        admission: Admission,
        telemetry: Telemetry,
        meter: Meter,
        send: Callable[[Message], None] = lambda _: None,
        on_ready: Callable[[Serving], None] = lambda _: None,
        on_fault: Callable[[WorkerFault], None] = lambda _: None,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._prepare = prepare
        self._admission = admission
        self._telemetry = telemetry
        self._meter = meter
        self._on_ready = on_ready
        self._on_fault = on_fault
        self._ledger = Ledger(telemetry.totals, send)
        telemetry.waiting = lambda: admission.waiting
        self._wake = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._cancels: deque[tuple[str, Failure | None]] = deque()
        self._accepting = False
        self._stopping = False
        self._is_tight = False
        self._rows: dict[int, Job] = {}
        self._sampled = 0.0
        self.refusal = Failure(503, "loading", "The model is still loading; try again shortly.")

    # ---- for other threads ------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a request.

        Raises:
            Refused: while loading, draining, short of memory, or when too many wait.
        """
        with self._wake:
            if not self._accepting:
                raise self._refuse(job, self.refusal)
            if self._is_tight:
                raise self._refuse(job, _TIGHT)
            try:
                self._admission.offer(job)
            except QueueFullError as error:
                raise self._refuse(job, Failure(503, "queue_full", f"Busy: {error}.")) from error
            self._ledger.moved(job, "queued")
            self._wake.notify_all()

    def _refuse(self, job: Job, failure: Failure) -> Refused:
        self._ledger.refused(job, failure)
        return Refused(failure, RETRY_SECONDS)

    def cancel(self, job_id: str, failure: Failure | None = None) -> None:
        """End a request before the next step: as cancelled, or failed when a reason is given."""
        with self._wake:
            self._cancels.append((job_id, failure))
            self._wake.notify_all()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on the engine's thread between two steps."""
        future: Future[Any] = Future()
        with self._wake:
            self._calls.append((function, future))
            self._wake.notify_all()
        return future

    def drain(self, reason: Failure) -> None:
        """Take no new requests; those that run or wait go on."""
        with self._wake:
            self._accepting = False
            self.refusal = reason

    def stop(self) -> None:
        """End the thread after the current step."""
        with self._wake:
            self._accepting = False
            self._stopping = True
            self._wake.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self._rows and self._admission.waiting == 0 and self._admission.running == 0

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no request runs or waits; False when that takes longer."""
        with self._wake:
            return self._wake.wait_for(lambda: self.is_idle, timeout)

    @property
    def is_accepting(self) -> bool:
        """Whether new requests are taken."""
        return self._accepting

    def audit(self) -> Future[dict[str, int]]:
        """Claimed, walked and measured bytes, taken between two steps."""
        return self.call(lambda: audit(self._serving, self._batch, self._meter))

    # ---- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Prepare, then serve; this is the boundary where a fault of any kind is reported."""
        try:
            self._serving = self._prepare()
            self._machine = make_text_state_machine(self._serving.tokenizer)
            self._batch = self._new_batch()
            self._sample(force=True)
            with self._wake:
                self._accepting = not self._stopping
            self._on_ready(self._serving)
            while self._wait_for_work():
                self._serve_once()
        except WorkerFault as fault:
            self._on_fault(fault)
        except Exception as error:  # the thread's boundary: nothing above could handle it
            logger.exception("The engine stopped")
            self._on_fault(WorkerFault("internal", f"{type(error).__name__}: {error}"))
        finally:
            with self._wake:
                self._accepting = False
            self._fail_all(_STOPPING)
            mx.clear_streams()  # MLX aborts at exit when a thread leaves its streams behind

    def _new_batch(self) -> Batch:
        serving = self._serving
        return Batch(
            serving.model,
            set(serving.tokenizer.eos_token_ids),
            self._admission.batch,
            serving.prefill_step,
            on_cpu=serving.on_cpu,
        )

    def _wait_for_work(self) -> bool:
        with self._wake:
            if not (self._rows or self._has_news()):
                self._wake.wait(_IDLE_SECONDS)
            return not self._stopping

    def _has_news(self) -> bool:
        return bool(self._calls or self._cancels or self._admission.waiting or self._stopping)

    def _serve_once(self) -> None:
        self._run_calls()
        self._run_cancels()
        while job := self._admission.start_next():
            self._start(job)
        if self._rows:
            self._charge()
        if self._rows:
            self._step()
        self._sample()

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except Exception as error:  # belongs to the caller, who waits for it
                future.set_exception(error)

    def _run_cancels(self) -> None:
        while self._cancels:
            job_id, failure = self._cancels.popleft()
            job = self._admission.withdraw(job_id)
            if job is None:
                job = next((j for j in self._rows.values() if j.id == job_id), None)
            if job is not None:
                self._end(job, Delta(failure=failure, cancelled=failure is None))

    def _start(self, job: Job) -> None:
        serving = self._serving
        job.answer = Answer(
            serving.tokenizer.detokenizer,
            job.stop,
            self._machine if job.is_chat else None,
            job.starts_in,
        )
        try:
            uid = self._batch.insert(job, serving.plan.new(), serving.vocab)
        except Exception as error:  # a bad request must not end the thread
            logger.exception("Request %s could not start", job.id, extra={"request": job.id})
            self._end(job, Delta(failure=_internal(error)))
            return
        job.uid = uid
        self._rows[uid] = job
        self._ledger.moved(job, "prefill")

    def _charge(self) -> None:
        chunk = self._batch.chunk()
        held = self._batch.rows_held()
        for uid, job in list(self._rows.items()):
            left = len(job.prompt) - job.fed
            now = held.get(uid, job.held_tokens)
            if not self._admission.charge(job, now, min(chunk, left) or 1):
                failure = Failure(503, "out_of_blocks", "The block pool ran dry; ask for less.")
                self._end(job, Delta(failure=failure))

    def _step(self) -> None:
        try:
            step = self._batch.step()
        except Exception as error:  # one batch fails, the engine lives
            logger.exception("A forward pass failed; its %d requests end", len(self._rows))
            self._fail_all(_internal(error))
            self._batch = self._new_batch()
            return
        self._telemetry.step += 1
        self._telemetry.note_work(step.prefill, step.decode)
        for fed in step.fed:
            if job := self._rows.get(fed.uid):
                job.fed = fed.tokens
                if fed.is_last:
                    self._ledger.moved(job, "decode")
        for token in step.tokens:
            if job := self._rows.get(token.uid):
                self._take(job, token)

    def _take(self, job: Job, token: Token) -> None:
        now = time.monotonic()
        job.last_token = now
        if job.first_token is None:
            job.first_token = now
        job.output_tokens += 1
        self._telemetry.totals.output_tokens += 1
        delta = Delta()
        if job.top_logprobs is not None and token.reason != "stop":
            top = top_of(token.logprobs, job.top_logprobs)
            chosen = float(cast(float, token.logprobs[token.token].item()))
            delta.logprobs.append(TokenLogprob(token.token, chosen, top))
        stopped = False
        if token.reason != "stop":
            delta.pieces, stopped = job.answer.feed(token.token)
        if stopped or token.reason:
            delta.pieces += job.answer.finish(stopped=stopped)
            delta.finish = _finish(job, "stop" if stopped else token.reason)
            self._end(job, delta, removed=token.reason is not None)
        elif delta.pieces or delta.logprobs:
            job.emit(delta)

    # ---- ends -------------------------------------------------------------------------------

    def _end(self, job: Job, delta: Delta, *, removed: bool = False) -> None:
        if job.uid is not None and self._rows.pop(job.uid, None) and not removed:
            self._batch.remove(job.uid)
        self._admission.finish(job)
        self._ledger.ended(job, delta)
        job.emit(delta)
        with self._wake:
            self._wake.notify_all()

    def _fail_all(self, failure: Failure) -> None:
        rows, self._rows = list(self._rows.values()), {}
        for job in rows:
            self._end(job, Delta(failure=failure))
        if self._stopping:
            while job := self._admission.withdraw_first():
                self._end(job, Delta(failure=failure))

    # ---- gauges and the memory guard --------------------------------------------------------

    def _sample(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._sampled < SAMPLE_SECONDS:
            return
        self._sampled = now
        self._batch.synchronize()
        reading = self._guard(self._meter.read())
        self._telemetry.gauges = look(
            self._serving, self._batch, self._admission, list(self._rows.values()), reading
        )

    def _guard(self, reading: Reading) -> Reading:
        """Give back freed buffers near the limit; beyond it the largest request goes."""
        if self._meter.is_soft(reading):
            mx.clear_cache()
            reading = self._meter.read()
        self._is_tight = self._meter.is_soft(reading)
        if self._meter.is_hard(reading) and self._rows:
            largest = max(self._rows.values(), key=lambda job: job.held_tokens)
            logger.error("Over the memory limit: request %s ends", largest.id)
            self._end(largest, Delta(failure=_OUT_OF_MEMORY))
            self._batch.synchronize()
            reading = self._meter.read()  # of what is left, as the claims will be
        return reading


def _internal(error: BaseException) -> Failure:
    return Failure(500, "internal_error", f"The model failed on this request: {error}"[:500])


def _finish(job: Job, reason: str | None) -> Finish:
    if reason == "length":
        return "length"
    return "tool_calls" if job.answer.made_tool_call else "stop"
