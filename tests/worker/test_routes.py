import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from veloxquant.worker import routes
from veloxquant.worker.guard import Guard
from veloxquant.worker.jobs import Failure
from veloxquant.worker.routes import Api

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "The river"}]


@pytest.fixture
async def client(bench: Any) -> AsyncIterator[TestClient]:
    api = Api(bench.spec, bench.engine, bench.telemetry, Guard("127.0.0.1"))
    api.serving = bench.serving
    server = TestServer(api.app())
    async with TestClient(server) as found:
        yield found


async def post(client: TestClient, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = await client.post(path, json=body)
    return answer.status, await answer.json()


async def events(client: TestClient, path: str, **body: Any) -> list[Any]:
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status == 200
    assert answer.content_type == "text/event-stream"
    text = await answer.text()
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(part[6:]) for part in text.split("\n\n")[:-2]]


async def test_a_stream_and_a_whole_answer_say_the_same(client: TestClient) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
    status, whole = await post(client, CHAT, **body)
    chunks = await events(client, CHAT, **body, stream_options={"include_usage": True})
    assert status == 200
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert text
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 20
    assert len({c["id"] for c in chunks}) == 1


async def test_completions_with_logprobs_stream_the_same_numbers(client: TestClient) -> None:
    body = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    _, whole = await post(client, TEXT, **body)
    chunks = await events(client, TEXT, **body)
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = [v for c in chunks for v in c["choices"][0]["logprobs"][name]]
        assert streamed == whole["choices"][0]["logprobs"][name]
        assert len(streamed) == 6
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]


@pytest.mark.parametrize("prompt", ["The river", ["The river"], [5, 6, 7], [[5, 6, 7]]])
async def test_prompts_come_in_four_forms(client: TestClient, prompt: Any) -> None:
    status, body = await post(client, TEXT, prompt=prompt, max_tokens=2)
    assert status == 200, body
    assert body["object"] == "text_completion"


@pytest.mark.parametrize(
    ("path", "fields", "status", "code", "param"),
    [
        (TEXT, {"prompt": ""}, 400, None, "prompt"),
        (TEXT, {"prompt": []}, 400, None, "prompt"),
        (TEXT, {"prompt": ["a", "b"]}, 400, "unsupported", "prompt"),
        (TEXT, {"prompt": [1, 2, 10**9]}, 400, None, "prompt"),
        (TEXT, {"prompt": [-1]}, 400, None, "prompt"),
        (TEXT, {"prompt": [5] * 600}, 400, "context_length_exceeded", "prompt"),
        (TEXT, {"prompt": "word " * 20_000}, 400, "context_length_exceeded", "prompt"),
        (TEXT, {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
        (TEXT, {"prompt": "a", "model": "../../x"}, 404, "model_not_found", "model"),
        (TEXT, {}, 400, None, None),
        (CHAT, {"messages": HELLO, "n": 3}, 400, "unsupported", "n"),
        (CHAT, {"messages": HELLO, "temperature": 3}, 400, None, "temperature"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            None,
            "messages",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused(
    client: TestClient, path: str, fields: Any, status: int, code: str | None, param: str | None
) -> None:
    got, body = await post(client, path, **fields)
    assert got == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)


async def test_text_parts_are_joined(client: TestClient) -> None:
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "river"}]
    body = {"max_tokens": 5, "temperature": 0}
    _, joined = await post(client, CHAT, messages=[{"role": "user", "content": parts}], **body)
    _, plain = await post(client, CHAT, messages=HELLO, **body)
    assert joined["usage"] == plain["usage"]
    assert joined["choices"] == plain["choices"]


async def test_stop_strings_work_in_streams(client: TestClient) -> None:
    body = {"prompt": "The river", "max_tokens": 40, "temperature": 0}
    _, whole = await post(client, TEXT, **body)
    text = whole["choices"][0]["text"]
    stop = text[10:13]
    chunks = await events(client, TEXT, **body, stop=[stop, "\x00never"])
    assert "".join(c["choices"][0]["text"] for c in chunks) == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def count_calls(owner: Any, name: str) -> threading.Semaphore:
    """Counts up after each call of a method."""
    calls, original = threading.Semaphore(0), getattr(owner, name)

    def counted(*args: Any) -> None:
        original(*args)
        calls.release()

    setattr(owner, name, counted)
    return calls


async def test_a_client_that_leaves_frees_its_row(bench: Any, gate_step: Any) -> None:
    api = Api(bench.spec, bench.engine, bench.telemetry, Guard("127.0.0.1"))
    api.serving = bench.serving
    runner = web.AppRunner(api.app(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    arrived, left = count_calls(bench.engine, "submit"), count_calls(bench.engine, "cancel")
    for stream in (True, False):
        gate_step.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "The river", "max_tokens": 400, "stream": stream}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        assert await asyncio.to_thread(arrived.acquire, timeout=5)
        writer.transport.abort()
        assert await asyncio.to_thread(left.acquire, timeout=5)
        gate_step.set()
        assert await asyncio.to_thread(bench.engine.wait_idle, 5)
        del reader
    await runner.cleanup()
    assert bench.telemetry.totals.cancelled == 2
    assert bench.telemetry.totals.output_tokens <= 4


async def test_a_body_that_never_comes_is_cut_off(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.1)
    api = Api(bench.spec, bench.engine, bench.telemetry, Guard("127.0.0.1"))
    async with TestServer(api.app()) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(
            f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 100\r\n\r\n{".encode()
        )
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        assert b" 408 " in answer
        writer.close()


async def test_a_failure_in_a_stream_is_an_event(bench: Any, client: TestClient) -> None:
    answer = await client.post(TEXT, json={"prompt": "x", "max_tokens": 400, "stream": True})
    await answer.content.readuntil(b"\n\n")
    bench.engine._batch.step = lambda: (_ for _ in ()).throw(RuntimeError("boom"))
    text = (await answer.content.read()).decode()
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert "boom" in json.loads(data[6:])["error"]["message"]
    assert "[DONE]" not in text


async def test_models_health_and_metrics(bench: Any, client: TestClient) -> None:
    listed = await (await client.get("/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == ["tiny"]
    assert listed["data"][0]["context"] == bench.spec.context
    assert (await client.get("/v1/models/tiny")).status == 200
    assert (await client.get("/v1/models/org/none")).status == 404
    assert (await client.get("/healthz")).status == 200
    assert (await client.get("/readyz")).status == 200
    assert (await (await client.get("/version")).json())["version"]
    await post(client, TEXT, prompt="x", max_tokens=3, temperature=0)
    text = await (await client.get("/metrics")).text()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert all(name.startswith("veloxquant_") for name in lines)
    assert lines["veloxquant_generation_tokens_total"] == "3"
    assert lines['veloxquant_requests_done_total{reason="length"}'] == "1"
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert len(names) == text.count("# TYPE")


async def test_draining_is_not_ready_but_alive(bench: Any, client: TestClient) -> None:
    bench.engine.drain(Failure(503, "stopping", "The server is stopping."))
    for method, path in (("GET", "/readyz"), ("POST", TEXT)):
        answer = await client.request(method, path, json={"prompt": "x"})
        assert answer.status == 503
        assert answer.headers["Retry-After"]
        assert (await answer.json())["error"]["code"] == "stopping"
    assert (await client.get("/healthz")).status == 200


async def test_health_tells_strangers_nothing(bench: Any) -> None:
    api = Api(bench.spec, bench.engine, bench.telemetry, Guard("127.0.0.1", "key"))
    async with TestClient(TestServer(api.app())) as client:
        assert await (await client.get("/health")).json() == {"status": "ok"}
        answer = await client.get("/health", headers={"Authorization": "Bearer key"})
        assert (await answer.json())["method"] == "fp16"


async def test_a_full_queue_says_when_to_come_back(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(batch=1)
    monkeypatch.setattr("veloxquant.worker.admission.MAX_WAITING", 0)
    api = Api(bench.spec, bench.engine, bench.telemetry, Guard("127.0.0.1"))
    api.serving = bench.serving
    async with TestClient(TestServer(api.app())) as client:
        answer = await client.post(TEXT, json={"prompt": "x"})
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert (await answer.json())["error"]["code"] == "queue_full"
