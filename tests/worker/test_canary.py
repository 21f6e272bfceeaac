from typing import Any

import mlx.core as mx
import pytest

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.worker import canary
from veloxquant.worker.caches import CachePlan
from veloxquant.worker.faults import WorkerFault


class Words:
    """A tokenizer by characters."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) for c in text]


class Memory:
    """A cache that keeps all tokens, or the newest few."""

    def __init__(self, keep: int | None) -> None:
        self.keep, self.seen = keep, []
        self.state, self.nbytes = mx.zeros((1,)), 4

    def merge(self, caches: list[Any]) -> Any:
        return caches[0]


class Parrot:
    """Continues with what followed the longest match in what its cache still holds."""

    def __call__(self, tokens: mx.array, cache: list[Memory]) -> mx.array:
        rows = []
        for token in tokens[0].tolist():  # type: ignore[union-attr]
            seen = cache[0].seen
            seen.append(token)
            if cache[0].keep is not None:
                del seen[: -cache[0].keep]
            rows.append(self.next(seen))
        return mx.eye(256)[mx.array(rows)][None]

    def next(self, seen: list[int]) -> int:
        for size in (28, 12, 6):
            tail = seen[-size:]
            for at in range(len(seen) - size - 1, -1, -1):
                if seen[at : at + size] == tail:
                    return seen[at + size]
        return 0


def plan(keep: int | None, compressed: int = 1) -> CachePlan:
    config = KVCacheConfig(method="streaming_llm")
    return CachePlan(config, lambda: [Memory(keep)], ["compressed"], [""], compressed, [])


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "plain_caches", lambda _: [Memory(None)])


def recall(plan: CachePlan, **fields: Any) -> list[str]:
    given = {"context": 4096, "chunk": 256, "report": lambda *_: None, **fields}
    return canary.recall(Parrot(), Words(), plan, **given)


def test_a_method_that_forgets_gives_a_warning() -> None:
    assert recall(plan(None)) == []
    [warning] = recall(plan(100))
    assert "streaming_llm" in warning
    assert "forgot" in warning


def test_a_model_that_fails_anyway_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parrot, "next", lambda *_: 0)
    assert recall(plan(100)) == []


@pytest.mark.parametrize("fields", [{"context": 100}])
def test_a_short_context_skips_the_check(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert recall(plan(100), **fields) == []
    assert "skipped" in caplog.text


def test_plain_caches_need_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parrot, "__call__", None)
    assert recall(plan(None, compressed=0)) == []


def test_what_is_not_a_number_stops_the_launch() -> None:
    def broken(tokens: mx.array, cache: Any) -> mx.array:
        return mx.full((1, tokens.shape[1], 4), float("nan"))

    with pytest.raises(WorkerFault) as fault:
        canary.check(broken, Words(), plan(None))
    assert fault.value.code == "canary_failed"


def test_an_exception_stops_the_launch_with_its_words() -> None:
    def broken(tokens: mx.array, cache: Any) -> mx.array:
        raise AttributeError("keys has no swapaxes")

    with pytest.raises(WorkerFault, match="keys has no swapaxes") as fault:
        canary.check(broken, Words(), plan(None))
    assert fault.value.code == "canary_failed"


def test_the_recall_check_reports_every_piece_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_recall_length", lambda *_: (600, ""))
    told: list[tuple[int, int, str]] = []
    recall(plan(100), report=lambda *words: told.append(words))
    whats = list(dict.fromkeys(what for *_, what in told))
    assert whats == ["recall check, 600 tokens", "recall check uncompressed, 600 tokens"]
    for what in whats:
        done = [n for n, _, name in told if name == what]
        assert done[:3] == [0, 256, 512]
        assert done == sorted(done)
        assert done[-1] <= 600
