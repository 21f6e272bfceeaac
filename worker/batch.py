"""mlx-lm's batch generator behind a small face: the only file that looks into its insides."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from veloxquant.memory.walker import arrays_in
from veloxquant.worker.caches import rows_held
from veloxquant.worker.jobs import Job
from veloxquant.worker.sampling import make_processors, make_sampler

_CPU_PROMPTS = 4
_GPU_PROMPTS = 8
_MIN_CHUNK = 32


class Fed(NamedTuple):
    """Prompt tokens of a row that are in the cache now."""

    uid: int
    tokens: int
    is_last: bool


class Token(NamedTuple):
    """A new token of a row; `reason` is set when it is the last (`stop` or `length`)."""

    uid: int
    token: int
    logprobs: mx.array
    reason: str | None


class Step(NamedTuple):
    """What one step brought."""

    fed: list[Fed]
    tokens: list[Token]
    prefill: tuple[int, float]
    decode: tuple[int, float]


@contextmanager
def _wired_limit_untouched() -> Iterator[None]:
    """Keep the generator from raising the wired limit, which can panic macOS."""
    module: Any = importlib.import_module("mlx_lm.generate")
    original = module.maybe_set_recommended_wired_limit
    module.maybe_set_recommended_wired_limit = lambda: None
    try:
        yield
    finally:
        module.maybe_set_recommended_wired_limit = original


class Batch:
    """Rows that run side by side; belongs to the engine's thread.

    Args:
        model: the loaded model.
        eos: token ids that end an answer.
        rows: most rows at once.
        prefill_step: most prompt tokens of a step, over all rows.
        on_cpu: take fewer prompts at once, since a step must stay short there.
    """

    def __init__(
        self, model: Any, eos: set[int], rows: int, prefill_step: int, *, on_cpu: bool
    ) -> None:
        self._step_tokens = prefill_step
        self._prompts = min(rows, _CPU_PROMPTS if on_cpu else _GPU_PROMPTS)
        self._stop = StopSequences([(token,) for token in sorted(eos)])
        with _wired_limit_untouched():
            self._generator = BatchGenerator(
                model,
                completion_batch_size=rows,
                prefill_batch_size=self._prompts,
                prefill_step_size=prefill_step,
            )
        self._parted = True
        # it would copy the caches of every finished row; nobody reads the copies
        decoding: Any = self._generator._generation_batch
        decoding.extract_cache = lambda _: []

    def insert(self, job: Job, caches: list[Any], vocab: int) -> int:
        """Add a row; returns its id."""
        [uid] = self._generator.insert(
            [list(job.prompt)],
            max_tokens=[job.max_tokens],
            caches=[caches],
            samplers=[make_sampler(job.sampling, vocab)],
            logits_processors=[make_processors(job.sampling, len(job.prompt), vocab)],
            stop_sequences=[self._stop],
        )
        return uid

    def remove(self, uid: int) -> None:
        """Drop a row and what it holds."""
        self._generator.remove([uid])
        self._parted = False

    def chunk(self) -> int:
        """Most tokens that the next step reads of each prompt."""
        rows = len(self._generator._prompt_batch) + len(self._generator._unprocessed_sequences)
        return max(_MIN_CHUNK, self._step_tokens // max(1, min(rows, self._prompts)))

    def step(self) -> Step:
        """One token for every decoding row, one chunk for every prompt.

        Raises:
            Exception: whatever the model raises; the batch is of no use afterwards.
        """
        generator = self._generator
        generator.prefill_step_size = generator._prompt_batch.prefill_step_size = self.chunk()
        counters = generator._counters
        before = _work(counters)
        prompts, tokens = generator.next()
        read, read_seconds, made, made_seconds = (
            b - a for a, b in zip(before, _work(counters), strict=True)
        )
        generator._generation_batch._current_logprobs = []  # in `tokens` now, and gone with them
        self._parted = not any(r.finish_reason for r in tokens)
        return Step(
            [Fed(r.uid, r.progress[0], r.end_of_prompt) for r in prompts],
            [Token(r.uid, r.token, r.logprobs, r.finish_reason) for r in tokens],
            (int(read), read_seconds),
            (int(made), made_seconds),
        )

    def cache_lists(self) -> list[list[Any]]:
        """The caches of all rows, as lists by layer."""
        generator = self._generator
        return [
            *(sequence[3] for sequence in generator._unprocessed_sequences),
            generator._prompt_batch.prompt_cache,
            generator._generation_batch.prompt_cache,
        ]

    def rows_held(self) -> dict[int, int]:
        """Tokens that each row really holds, where the caches are ours and may give up some."""
        out = {}
        for batch in (self._generator._prompt_batch, self._generator._generation_batch):
            for row, uid in enumerate(batch.uids):
                if (held := rows_held(batch.prompt_cache, row)) is not None:
                    out[uid] = held
        return out

    def transient_bytes(self) -> int:
        """Bytes of log probabilities, token ids and sampling under way, which are not cache."""
        prompts, rows = self._generator._prompt_batch, self._generator._generation_batch
        held = [
            rows._next_logprobs, rows._current_tokens, rows._next_tokens, rows._token_context,
            *((batch.samplers, batch.logits_processors) for batch in (prompts, rows)),
            *(sequence[5:7] for sequence in self._generator._unprocessed_sequences),
        ]  # fmt: skip
        return sum(array.nbytes for array in arrays_in(held))

    def synchronize(self) -> None:
        """Wait for the step that runs ahead, and part the rows that stay from those that went.

        Rows of one step share buffers: until the next step one that stays would keep what the
        others had there, which nobody counts.
        """
        if not self._parted:
            self._part()
            self._parted = True
        mx.synchronize(self._generator.stream)

    def _part(self) -> None:
        rows = self._generator._generation_batch
        with mx.stream(self._generator.stream):
            # added to, not copied: a copy of a slice may stay in the slice's buffer
            own = [mx.add(row, 0) for row in rows._next_logprobs]
            mx.eval(own, [cache.state for cache in rows.prompt_cache])
        rows._next_logprobs = own


def _work(counters: Any) -> tuple[int, float, int, float]:
    return (
        counters.prompt_tokens, counters.prompt_time,
        counters.generation_tokens, counters.decode_time,
    )  # fmt: skip
