"""Every method in mlx-lm's continuous batching: each request gets the tokens it gets alone."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import EVICTING, READY, small_config

from tests.architectures import prompt, tiny, uncompiled
from veloxquant.cache.batch import RowBatch
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.exact import ExactRows
from veloxquant.cache.table import MethodRow, row_of
from veloxquant.quantizers.sizes import LayerShape

PREFILL_STEP = 32
Make = Callable[[], list[Any]]


@pytest.fixture(autouse=True)
def quiet_generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The generator must not touch the machine's wired memory, and nothing is compiled."""
    import mlx_lm.generate  # noqa: F401 - the attribute of that name is a function

    def refuse(*_: Any) -> None:
        raise AssertionError("the wired limit was set")

    module = sys.modules["mlx_lm.generate"]
    monkeypatch.setattr(module, "maybe_set_recommended_wired_limit", lambda: None)
    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    with uncompiled():
        yield


class Batch:
    """A `BatchGenerator` whose requests have names."""

    def __init__(self, model: Any, make: Make) -> None:
        self._generator = sys.modules["mlx_lm.generate"].BatchGenerator(
            model, prefill_step_size=PREFILL_STEP, prefill_batch_size=2, completion_batch_size=8
        )
        self.make = make
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def add(self, name: str, tokens: list[int], count: int, **options: Any) -> None:
        options.setdefault("caches", [self.make()])
        (uid,) = self._generator.insert([tokens], max_tokens=[count], **options)
        self._names[uid] = name
        self.tokens[name] = []

    def uid(self, name: str) -> int:
        return next(uid for uid, other in self._names.items() if other == name)

    def step(self) -> None:
        _, answers = self._generator.next()
        for answer in answers:
            name = self._names[answer.uid]
            self.tokens[name].append(answer.token)
            if answer.finish_reason:
                self.finished[name] = answer

    def remove(self, name: str) -> list[Any]:
        """Take a request out while it decodes; its caches."""
        uid = self.uid(name)
        return self._generator.remove([uid], return_prompt_caches=True)[uid][0]

    def peek(self, name: str) -> list[Any]:
        """Copies of a request's caches; it goes on."""
        uid = self.uid(name)
        return self._generator.extract_cache([uid])[uid][0]

    def run_until(self, done: Callable[[], bool]) -> None:
        for _ in range(300):
            if done():
                return
            self.step()
        raise AssertionError(f"still running after 300 steps: {self.tokens}")

    def finish(self, *names: str) -> None:
        self.run_until(lambda: set(names) <= set(self.finished))


def alone(model: Any, make: Make, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens of one request through mlx-lm's plain loop."""
    from mlx_lm.generate import generate_step

    steps = generate_step(
        mx.array(tokens),
        model,
        max_tokens=count,
        prompt_cache=make(),
        prefill_step_size=PREFILL_STEP,
    )
    return [int(token) for token, _ in steps]


def maker(model: Any, row: MethodRow) -> Make:
    config = small_config(row)
    plan = plan_model(model, config)
    assert plan.batchable
    return lambda: new_caches(plan, config)


def stock(model: Any) -> Make:
    from mlx_lm.models.cache import make_prompt_cache

    return lambda: make_prompt_cache(model)


# Prompts over several prefill steps; every budget and window of `small_config` overflows, and
# blocks of 32 tokens fill up in prompts and while decoding.
LONG, LONGER, SHORT, LATE = prompt(86, 1), prompt(99, 2), prompt(41, 3), prompt(60, 4)
PARTS = {"long": (LONG, 14), "longer": (LONGER, 6), "short": (SHORT, 9), "late": (LATE, 9)}


def come_and_go(model: Any, make: Make) -> tuple[Batch, list[Any], int]:
    """Two start together; one joins, another joins and is taken out; all in mid-run."""
    batch = Batch(model, make)
    batch.add("long", *PARTS["long"])
    batch.add("longer", *PARTS["longer"])
    batch.run_until(lambda: len(batch.tokens["long"]) == 2)
    batch.add("short", *PARTS["short"])
    batch.add("late", *PARTS["late"])
    batch.run_until(lambda: len(batch.tokens["late"]) == 5)
    caches = batch.remove("late")
    batch.finish("long", "longer", "short")
    return batch, caches, len(batch.tokens["late"])


@pytest.mark.parametrize("row", READY, ids=lambda row: row.name)
def test_requests_that_come_and_go_get_the_tokens_they_get_alone(row: MethodRow) -> None:
    model = tiny("llama")
    make = maker(model, row)
    batch, caches, seen = come_and_go(model, make)
    wanted = {name: alone(model, make, *part) for name, part in PARTS.items()}
    for name in ("long", "longer", "short"):
        assert batch.tokens[name] == wanted[name], name
    assert batch.tokens["late"] == wanted["late"][:seen]

    # What was taken out goes on in another batch as if it had never left.
    again = Batch(model, make)
    again.add("other", SHORT, 9)
    again.run_until(lambda: len(again.tokens["other"]) == 3)
    again.add("late", [wanted["late"][seen]], PARTS["late"][1] - seen - 1, caches=[caches])
    again.finish("late", "other")
    assert again.tokens["late"] == wanted["late"][seen + 1 :]
    assert again.tokens["other"] == wanted["short"]


def test_fp16_gives_the_tokens_of_stock_caches() -> None:
    model = tiny("llama")
    ours, _, _ = come_and_go(model, maker(model, row_of("fp16")))
    theirs, _, _ = come_and_go(model, stock(model))
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("row", READY, ids=lambda row: row.name)
def test_compression_stays_on_in_a_batch(row: MethodRow) -> None:
    """The caches that come out are those of the method, with their bytes."""
    model, parts = tiny("llama"), {"long": (LONG, 3), "longer": (LONGER, 3)}
    make = maker(model, row)
    batch = Batch(model, make)
    for name, part in parts.items():
        batch.add(name, *part)
    batch.finish(*parts)
    for name, (tokens, count) in parts.items():
        single = Batch(model, make)
        single.add(name, tokens, count)
        single.finish(name)
        pairs = (b.finished[name].prompt_cache for b in (batch, single))
        for mine, other in zip(*pairs, strict=True):
            assert type(mine) is type(other)
            assert mine.offset == len(tokens) + count
            mine.commit()
            other.commit()
            assert mine.nbytes == other.nbytes
            if row in EVICTING:
                assert mine.rows < mine.offset


@pytest.mark.parametrize("row", READY, ids=lambda row: row.name)
def test_looking_at_a_cache_in_mid_run_disturbs_nothing(row: MethodRow) -> None:
    model = tiny("llama")
    make = maker(model, row)
    batch = Batch(model, make)
    batch.add("long", LONG, 9)
    batch.add("short", SHORT, 9)
    batch.run_until(lambda: len(batch.tokens["long"]) == 5)
    seen, copied = len(batch.tokens["long"]), batch.peek("long")
    batch.finish("long", "short")
    wanted = alone(model, make, LONG, 9)
    assert batch.tokens["long"] == wanted
    # The copy has its own life, too: it goes on from where it was taken.
    later = Batch(model, make)
    later.add("long", [wanted[seen]], 9 - seen - 1, caches=[copied])
    later.finish("long")
    assert later.tokens["long"] == wanted[seen + 1 :]


@pytest.mark.parametrize("row", [row_of("kivi"), row_of("snapkv")], ids=lambda row: row.name)
def test_a_row_that_stops_early_leaves_the_others_alone(row: MethodRow) -> None:
    model = tiny("llama")
    make = maker(model, row)
    wanted = alone(model, make, LONG, 12)
    stop = next(i for i in range(2, 12) if wanted[i] not in wanted[:i])
    sequences = sys.modules["mlx_lm.generate"].StopSequences([[wanted[stop]]])
    batch = Batch(model, make)
    batch.add("long", LONG, 12, stop_sequences=[sequences])
    batch.add("longer", LONGER, 12)
    batch.finish("long", "longer")
    assert batch.finished["long"].finish_reason == "stop"
    assert batch.tokens["long"] == wanted[: stop + 1]
    assert batch.tokens["longer"] == alone(model, make, LONGER, 12)


MIXED = [
    ("llama_sliding", "snapkv"),
    ("gemma2", "kivi"),
    ("gemma2", "fp16"),
    ("gemma3", "kivi_sink"),
    ("gemma3n", "snapkv"),
    ("gemma4", "kivi"),
    ("gpt_oss", "kivi"),
    ("gpt_oss", "streaming_llm"),
    ("deepseek_v2", "turboquant_rvq"),
    ("deepseek_v32", "kivi"),
    ("qwen3_next", "kivi"),
    ("lfm2", "snapkv"),
    ("falcon_h1", "streaming_llm"),
    ("phi", "turboquant_rvq"),
]


@pytest.mark.parametrize(("name", "method"), MIXED)
def test_other_architectures_batch_with_their_own_caches_beside_ours(
    name: str, method: str
) -> None:
    model = tiny(name)
    make = maker(model, row_of(method))
    batch = Batch(model, make)
    batch.add("short", SHORT, 7)
    batch.add("longer", LONGER, 3)
    batch.run_until(lambda: len(batch.tokens["short"]) == 2)
    batch.add("long", LONG, 3)
    batch.finish("short", "longer", "long")
    assert batch.tokens["short"] == alone(model, make, SHORT, 7)
    assert batch.tokens["longer"] == alone(model, make, LONGER, 3)
    assert batch.tokens["long"] == alone(model, make, LONG, 3)
    if method == "fp16":
        assert batch.tokens["longer"] == alone(model, stock(model), LONGER, 3)


@pytest.mark.parametrize(("method", "rows"), [("kivi", 1), ("kivi", 3), ("snapkv", 3)])
def test_decoding_keeps_no_graph_alive(method: str, rows: int) -> None:
    """Only logits are evaluated; memory grows by what the caches say, not by their history."""
    model = tiny("llama")
    make = maker(model, row_of(method))
    caches = make()
    if rows > 1:
        each = zip(caches, *(make() for _ in range(rows - 1)), strict=True)
        caches = [same[0].merge(list(same)) for same in each]
    tokens = mx.array([prompt(40, seed) for seed in range(rows)])
    mx.eval(model(tokens, cache=caches))
    mx.eval([c.state for c in caches])
    step = tokens[:, :1]

    def decode(steps: int) -> None:
        for _ in range(steps):
            mx.eval(model(step, cache=caches))

    decode(8)
    mx.synchronize()
    memory, held = mx.get_active_memory(), sum(c.nbytes for c in caches)
    decode(200)
    mx.synchronize()
    memory, held = mx.get_active_memory() - memory, sum(c.nbytes for c in caches) - held
    assert memory <= 1.05 * held + 64 * 1024


class Summing(ExactRows):
    """Accumulates something that attention never reads, as scorers do."""

    def __init__(self) -> None:
        super().__init__(LayerShape(4, 2, 64, 64, 4), "summing")
        self.returns = "views"
        self.total = mx.zeros(1)

    def observe(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        self.total = self.total + queries.sum() * scale

    def extra_arrays(self) -> Iterator[mx.array]:
        yield self.total


@pytest.mark.parametrize("rows", [1, 3])
def test_what_attention_never_reads_is_evaluated_with_its_output(rows: int) -> None:
    batch: Any = Summing() if rows == 1 else RowBatch([Summing() for _ in range(rows)])
    made = mx.random.normal((3, rows, 4, 1, 64))

    def decode(steps: int) -> int:
        for _ in range(steps):
            q, k, v = made + 1  # fresh buffers, which an old graph would keep
            keys, values = batch.update_and_fetch(k[:, :2], v[:, :2])
            mx.eval(keys.attend(q, values, 0.1, None))
        mx.synchronize()
        return mx.get_active_memory()

    memory, held = decode(8), batch.nbytes
    memory, held = decode(200) - memory, batch.nbytes - held
    assert memory <= 1.05 * held + 32 * 1024
