"""The OpenAI-compatible API of the real binary, seen through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from test_serve_demo import RealHome

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
GO_ON: Any = {"ignore_eos": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, native_build: Any) -> Iterator[OpenAI]:
    home = RealHome(tmp_path_factory.mktemp("contract"), native_build.root)
    running = home.serve()
    try:
        running.until_state("ready", timeout_s=90)
        url = f"http://127.0.0.1:{running.port}/v1"
        yield OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=120)
    finally:
        home.close()


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["flashnext-demo"]


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=ASK, max_tokens=12, seed=3, extra_body=GO_ON
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.model == "flashnext-demo"


def test_chat_streaming_says_the_same(client: OpenAI) -> None:
    fixed: Any = {"model": "any", "messages": ASK, "max_tokens": 12, "seed": 3, "temperature": 0}
    whole = client.chat.completions.create(**fixed, extra_body=GO_ON).choices[0].message.content
    text, chunks, usage = "", 0, None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        **fixed, extra_body=GO_ON, stream=True, stream_options=options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            chunks += 1
    assert text == whole
    assert chunks > 2
    assert usage is not None and usage.completion_tokens == 12


def test_completions_and_streaming(client: OpenAI) -> None:
    fixed: Any = {"model": "any", "prompt": "Once", "max_tokens": 10, "seed": 1, "temperature": 0}
    whole = client.completions.create(**fixed, extra_body=GO_ON)
    assert whole.choices[0].finish_reason == "length" and whole.choices[0].text
    parts = [
        c.choices[0].text
        for c in client.completions.create(**fixed, extra_body=GO_ON, stream=True)
        if c.choices
    ]
    assert "".join(parts) == whole.choices[0].text


def test_stop_word_ends_before_it(client: OpenAI) -> None:
    fixed: Any = {"model": "any", "prompt": "Once", "max_tokens": 24, "seed": 1, "temperature": 0}
    text = client.completions.create(**fixed, extra_body=GO_ON).choices[0].text
    word = next(text[n : n + 2] for n in range(4, len(text) - 2) if text[n : n + 2].isascii())
    stopped = client.completions.create(**fixed, stop=[word], extra_body=GO_ON).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(word)]


def test_a_request_over_the_context_is_a_400(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "x " * 5000}], max_tokens=4
        )
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "exceed_context_size_error"
    assert caught.value.body["n_ctx"] == 4096
    assert client.models.list().data, "and the server goes on"


def test_nonsense_is_a_400_and_a_wrong_path_a_404(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="any", messages="no list", max_tokens=4)  # type: ignore[call-overload]
    root = str(client.base_url)
    assert httpx.post(f"{root}nowhere", json={}).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_round_trip(client: OpenAI, stream: bool) -> None:
    """Random weights call no tool by themselves: the required choice forces the form, a bias the start."""
    root = str(client.base_url).removesuffix("/v1/")

    def token(text: str) -> int:
        reply = httpx.post(f"{root}/tokenize", json={"content": text, "parse_special": True}).json()
        (only,) = reply["tokens"]
        return int(only)

    bias: Any = {"logit_bias": [[token("<tool_call>"), 50], [token("<|im_end|>"), 50]]}
    asked: Any = {
        "model": "any",
        "messages": ASK,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 1,
        "extra_body": bias,
    }
    name, arguments, call_id, reason = "", "", "", None
    if stream:
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                for part in choice.delta.tool_calls or []:
                    call_id = part.id or call_id
                    name += (part.function and part.function.name) or ""
                    arguments += (part.function and part.function.arguments) or ""
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        reason = choice.finish_reason
        (call,) = choice.message.tool_calls or []
        name, arguments, call_id = call.function.name, call.function.arguments, call.id
    assert (reason, name) == ("tool_calls", "weather")
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    called = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    result: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny, 21 degrees"},
    ]
    final = client.chat.completions.create(
        model="any", messages=result, tools=[WEATHER], tool_choice="none", max_tokens=8, extra_body=GO_ON
    )
    assert final.choices[0].message.content


def test_follow_up_reuses_the_prompt(client: OpenAI) -> None:
    talk: Any = [{"role": "user", "content": "Tell me about the harbour. " * 60}]
    first = client.chat.completions.create(
        model="any", messages=talk, max_tokens=8, temperature=0, extra_body=GO_ON
    )
    talk = [
        *talk,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And the boats?"},
    ]
    second = client.chat.completions.create(
        model="any", messages=talk, max_tokens=8, temperature=0, extra_body=GO_ON
    )
    assert first.usage is not None and second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    assert second.usage.prompt_tokens - details.cached_tokens < 600, "new tokens and one checkpoint step"
