"""One middleware between the network and every route: who asks, from where, and how much.

A web page must not be able to use the server: `Host` stops DNS rebinding, `Origin` stops pages
that the user merely visits, and the content type stops requests a browser sends unasked.
"""

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

logger = logging.getLogger(__name__)

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/health"})
MAX_ACTIVE = 128
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    """An error as OpenAI's clients expect it."""
    return web.Response(
        status=status,
        body=msgspec.json.encode(error_body(status, message, code, param)),
        content_type="application/json",
        headers=headers,
    )


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Guard:
    """The checks, in order: host, origin, key, size of the crowd, type of the body.

    Args:
        bind_host: address the server listens on; a wider one lets plain IP addresses in, since
            rebinding needs a name.
        token: bearer token that every path but the public ones requires; empty for none.
        origins: web origins that may call, such as `http://localhost:3000`.
    """

    def __init__(self, bind_host: str, token: str = "", origins: Iterable[str] = ()) -> None:
        self._token = token.encode()
        self._origins = frozenset(origins)
        self._is_local = is_loopback(bind_host)
        self._names = LOCAL_NAMES | {bind_host.strip("[]").lower()}
        self._active = 0

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse, or hand on and turn every refusal of the router into JSON."""
        if refusal := self._refusal(request):
            return refusal
        self._active += 1
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _as_json(request, error)
        except Exception:  # a route's boundary: the client gets no traceback, the log does
            logger.exception("%s %s failed", request.method, request.path)
            return error_response(500, "The server made a mistake; see its log.", code="internal")
        finally:
            self._active -= 1

    def is_authorized(self, request: web.Request) -> bool:
        """Whether the request carries the key, or none is needed."""
        if not self._token:
            return True
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode(errors="surrogateescape"), self._token
        )

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not self._host_is_ours(request.headers.get("Host", "")):
            return error_response(403, "This host name is not served here.", code="bad_host")
        origin = request.headers.get("Origin")
        if origin is not None and origin not in self._origins:
            return error_response(403, "Web pages may not use this server.", code="bad_origin")
        if request.path not in PUBLIC_PATHS and not self.is_authorized(request):
            return error_response(
                401,
                "A valid API key is needed: Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._active >= MAX_ACTIVE:
            return error_response(
                503, "Too many connections.", code="busy", headers={"Retry-After": "1"}
            )
        if request.method in _WITH_BODY:
            return _body_refusal(request)
        return None

    def _host_is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in self._names:
            return True
        return not self._is_local and _is_address(name)


def _body_refusal(request: web.Request) -> web.Response | None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        return error_response(415, "Compressed bodies are not read.", code="bad_encoding")
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        return error_response(
            415, "Send JSON with Content-Type: application/json.", code="bad_content_type"
        )
    return None


def _as_json(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    messages = {
        404: f"There is nothing at {request.path}.",
        405: f"{request.path} does not answer {request.method}.",
        413: "The body is larger than 16 MiB.",
    }
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    text = messages.get(error.status, error.reason or "Refused.")
    codes = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
    return error_response(error.status, text, code=codes.get(error.status), headers=headers)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    bare = host.strip("[]").lower()
    if bare == "localhost":
        return True
    return _is_address(bare) and ipaddress.ip_address(bare).is_loopback
