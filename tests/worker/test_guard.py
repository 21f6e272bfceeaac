from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from veloxquant.worker.guard import Guard, is_loopback


async def hello(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response({})


async def broken(_: web.Request) -> web.Response:
    raise KeyError("a secret detail")


def app(guard: Guard) -> web.Application:
    out = web.Application(middlewares=[guard.middleware], client_max_size=1000)
    out.add_routes([web.post("/v1/x", hello), web.get("/v1/x", hello), web.get("/broken", broken)])
    out.add_routes([web.get(path, hello) for path in ("/healthz", "/metrics")])
    return out


@pytest.fixture
async def client() -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(app(Guard("127.0.0.1")))) as found:
        yield found


JSON = {"Content-Type": "application/json"}
GOOD_HOSTS = ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8000")
BAD_HOSTS = (
    "", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "192.168.1.5",
    "0.0.0.0", "[::2]", "[", "127.0.0.1@evil.example", "localhost:8000@evil.example",
)  # fmt: skip


@pytest.mark.parametrize("host", GOOD_HOSTS)
async def test_local_names_are_served(client: TestClient, host: str) -> None:
    answer = await client.get("/v1/x", headers={"Host": host})
    assert answer.status == 200


@pytest.mark.parametrize("host", BAD_HOSTS)
async def test_other_names_are_not(client: TestClient, host: str) -> None:
    answer = await client.get("/healthz", headers={"Host": host})
    assert answer.status == 403
    assert (await answer.json())["error"]["code"] == "bad_host"


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "http://localhost:8000", "http://127.0.0.1", "file://"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_web_pages_are_turned_away(client: TestClient, method: str, origin: str) -> None:
    answer = await client.request(method, "/v1/x", headers={"Origin": origin, **JSON})
    assert answer.status == 403
    assert not [name for name in answer.headers if name.startswith("Access-Control")]


async def test_a_listed_origin_may_call() -> None:
    guard = Guard("127.0.0.1", origins=["http://localhost:3000"])
    async with TestClient(TestServer(app(guard))) as client:
        for origin, status in (("http://localhost:3000", 200), ("http://localhost:3001", 403)):
            assert (await client.get("/v1/x", headers={"Origin": origin})).status == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": ""}, 415),
        ({**JSON, "Content-Encoding": "gzip"}, 415),
        ({**JSON, "Content-Encoding": "identity"}, 200),
    ],
)
async def test_only_plain_json_is_read(
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    answer = await client.post("/v1/x", data=b"{}", headers=headers)
    assert answer.status == status


async def test_a_post_without_a_type_is_refused(client: TestClient) -> None:
    answer = await client.post("/v1/x", skip_auto_headers=["Content-Type"], data=b"{}")
    assert answer.status == 415


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("HEAD", "/nothing", 404),
        ("HEAD", "/v1/x", 200),
        ("DELETE", "/v1/x", 405),
        ("PUT", "/v1/x", 405),
        ("OPTIONS", "/v1/x", 405),
        ("POST", "/healthz", 405),
    ],
)
async def test_errors_of_the_router_are_json(
    client: TestClient, method: str, path: str, status: int
) -> None:
    answer = await client.request(method, path, headers=JSON)
    assert answer.status == status
    assert answer.content_type == "application/json"
    if status != 200 and method != "HEAD":
        assert (await answer.json())["error"]["message"]
    assert (status == 405) == ("Allow" in answer.headers)


async def test_a_large_body_is_413(client: TestClient) -> None:
    answer = await client.post("/v1/x", data=b"x" * 2000, headers=JSON)
    assert answer.status == 413
    assert (await answer.json())["error"]["code"] == "too_large"


async def test_a_fault_shows_no_detail(client: TestClient) -> None:
    answer = await client.get("/broken")
    assert answer.status == 500
    assert "secret" not in await answer.text()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer the-key", 200),
        ("bearer the-key", 200),
        ("Bearer the-kez", 401),
        ("Bearer ", 401),
        ("Basic the-key", 401),
        ("the-key", 401),
        ("Bearer \u00e9", 401),
        (None, 401),
    ],
)
async def test_the_key_is_needed_everywhere_but_health(header: str | None, status: int) -> None:
    async with TestClient(TestServer(app(Guard("127.0.0.1", "the-key")))) as client:
        headers = {} if header is None else {"Authorization": header}
        assert (await client.get("/v1/x", headers=headers)).status == status
        assert (await client.get("/metrics", headers=headers)).status == status
        assert (await client.get("/nothing", headers=headers)).status == (
            404 if status == 200 else 401
        )
        assert (await client.get("/healthz", headers=headers)).status == 200


async def test_a_wide_bind_lets_addresses_in_but_no_names() -> None:
    async with TestClient(TestServer(app(Guard("0.0.0.0", "k")))) as client:
        for host, status in (("192.168.1.5:8000", 200), ("evil.example", 403)):
            assert (await client.get("/healthz", headers={"Host": host})).status == status


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
