"""What became of each request: one message to the supervisor, one log line, the totals."""

import logging
import time
from collections.abc import Callable
from typing import Literal

from veloxquant.supervisor.messages import Message, Request
from veloxquant.worker.jobs import Delta, Failure, Job
from veloxquant.worker.telemetry import Totals

logger = logging.getLogger(__name__)


class Ledger:
    """Books requests; prompts and answers are never in it."""

    def __init__(self, totals: Totals, send: Callable[[Message], None]) -> None:
        self._totals = totals
        self._send = send

    def moved(self, job: Job, state: Literal["queued", "prefill", "decode"]) -> None:
        """A request entered a stage."""
        self._send(Request(job.id, state, prompt_tokens=len(job.prompt)))

    def refused(self, job: Job, failure: Failure) -> None:
        """A request was turned away."""
        self._totals.refused += 1
        self._send(
            Request(job.id, "refused", prompt_tokens=len(job.prompt), detail=failure.message)
        )

    def ended(self, job: Job, delta: Delta) -> None:
        """A request is over, well or not."""
        totals, seconds = self._totals, time.monotonic() - job.submitted
        totals.seconds_sum += seconds
        if job.ttft is not None:
            totals.ttft.append(job.ttft)
            totals.ttft_sum += job.ttft
            totals.ttft_count += 1
        if delta.finish is not None:
            state, detail = "done", ""
            totals.done += 1
            totals.finishes[delta.finish] += 1
        elif delta.failure is not None:
            state, detail = "failed", delta.failure.message
            totals.failed += 1
        else:
            state, detail = "cancelled", ""
            totals.cancelled += 1
        self._send(
            Request(
                job.id,
                state,
                prompt_tokens=len(job.prompt),
                output_tokens=job.output_tokens,
                ttft=job.ttft,
                tps=job.tokens_per_second,
                seconds=seconds,
                finish=delta.finish or "",
                detail=detail,
            )
        )
        logger.info(
            "%s: %d prompt and %d answer tokens in %.2f s%s",
            state, len(job.prompt), job.output_tokens, seconds, f" ({detail})" if detail else "",
            extra={"request": job.id},
        )  # fmt: skip
