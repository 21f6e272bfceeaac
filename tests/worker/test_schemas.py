import json
from typing import Any

import pytest

from veloxquant.worker.schemas import BadRequestError, ChatRequest, CompletionRequest, decode

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "warm"),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1 << 40),
    ("max_tokens", 1.5),
    ("max_completion_tokens", 0),
    ("n", 0),
    ("n", 2),
    ("seed", 1 << 70),
    ("seed", "x"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 257),
    ("logit_bias", {"1": 101}),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("stream", "yes"),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"role": "wizard", "content": "hi"}]),
    ("messages", [{"content": "hi"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("response_format", {"type": "json_object"}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequestError) as error:
        decode(json.dumps({**CHAT, field: value}).encode(), ChatRequest)
    assert error.value.param == field
    assert error.value.status == 400


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"[" * 200_000,
        b'{"messages": ' + b"[" * 200_000,
        b'{"temperature": ' + b"9" * 5_000 + b"}",
        b'{"messages": [{"role": "user", "content": NaN}]}',
    ],
    ids=range(10),
)
def test_a_body_that_is_no_request_is_refused(raw: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(BadRequestError):
            decode(raw, kind)


@pytest.mark.parametrize("field", ["echo", "suffix", "best_of"])
def test_unserved_fields_of_completions_are_named(field: str) -> None:
    value = {"echo": True, "suffix": "x", "best_of": 2}[field]
    with pytest.raises(BadRequestError) as error:
        decode(json.dumps({"prompt": "hi", field: value}).encode(), CompletionRequest)
    assert error.value.param == field


def test_unknown_fields_are_ignored_and_null_means_default() -> None:
    body = {**CHAT, "user": "me", "service_tier": "auto", "temperature": None, "stop": None}
    request = decode(json.dumps(body).encode(), ChatRequest)
    sampling = request.sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert request.stops == ()
    assert request.wanted_logprobs is None


def test_a_request_is_read_in_full() -> None:
    body = {
        **CHAT, "stop": ["a", "b"], "max_tokens": 5, "max_completion_tokens": 7, "logprobs": True,
        "top_logprobs": 2, "seed": -1, "logit_bias": {"3": 1.5}, "top_k": -1,
    }  # fmt: skip
    request = decode(json.dumps(body).encode(), ChatRequest)
    assert request.stops == ("a", "b")
    assert (request.wanted_tokens, request.wanted_logprobs) == (7, 2)
    sampling = request.sampling()
    assert sampling.logit_bias == ((3, 1.5),)
    assert sampling.top_k == 0
    assert sampling.seed is not None
    assert sampling.seed > 0


@pytest.mark.parametrize("bias", [{"x": 1}, {"-1": 1}])
def test_a_bias_on_no_token_is_refused(bias: dict[str, float]) -> None:
    request = decode(json.dumps({**CHAT, "logit_bias": bias}).encode(), ChatRequest)
    with pytest.raises(BadRequestError, match="logit_bias"):
        request.sampling()
