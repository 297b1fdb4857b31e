"""The OpenAI-compatible API of a real server process, mostly through the official client."""

import json

import httpx
import openai
import pytest
import torch

from tkcc.engine.serve.tokenizer import Tokenizer
from tkcc.models.checkpoint import load_weights

PROMPT = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": "Write a short story about a river."}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def greedy(model_dir, tokenizer):
    """Greedy text by transformers: (prompt ids, count) -> token ids."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def run(ids, count):
        out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
        return out[0, len(ids) :].tolist()

    return run


def test_a_completion_is_transformers_greedy_text(client, server, tokenizer, greedy):
    ids = tokenizer.encode(PROMPT)
    answer = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=20, temperature=0)
    assert answer.choices[0].text == tokenizer.decode(greedy(ids, 20))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 20)
    assert answer.usage.total_tokens == len(ids) + 20 and answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.system_fingerprint.startswith("fp_")


def test_token_ids_are_a_prompt_too(client, server, tokenizer):
    by_text = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=9, temperature=0)
    for prompt in (tokenizer.encode(PROMPT), [tokenizer.encode(PROMPT)], [PROMPT]):
        again = client.completions.create(model=server.name, prompt=prompt, max_tokens=9, temperature=0)
        assert again.choices[0].text == by_text.choices[0].text


def test_a_chat_goes_through_the_models_template(client, server, tokenizer, greedy):
    text = f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer = client.chat.completions.create(
        model=server.name, messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    assert answer.choices[0].message.content == tokenizer.decode(greedy(ids, 12))
    assert answer.usage.prompt_tokens == len(ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    again = client.chat.completions.create(model=server.name, messages=parts, max_tokens=12, temperature=0)
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_a_stream_is_the_answer_in_pieces(client, server):
    ask = {"model": server.name, "messages": MESSAGES, "max_tokens": 15, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == whole.choices[0].message.content and len([d for d in deltas if d]) > 5
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 15
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1
    text = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=9, temperature=0, stream=True)
    assert len(list(text)) > 3


def test_the_wire_format_of_a_stream(server):
    body = {"model": server.name, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(e.startswith("data: {") for e in events[:-2])


def test_stop_strings_end_the_text_before_them(client, server):
    ask = {"model": server.name, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**ask).choices[0].text
    stop = text[10:13]
    assert stop.strip() and "\ufffd" not in text[:13]
    stopped = client.completions.create(**ask, stop=[stop, "never there"])
    assert stopped.choices[0].text == text[: text.index(stop)] and stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < 30
    streamed = client.completions.create(**ask, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == stopped.choices[0].text


def test_seeds_repeat_and_differ(client, server):
    def text(seed, **more):
        ask = {"model": server.name, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": seed, **more}
        return client.completions.create(**ask).choices[0].text

    assert text(1) == text(1) and len({text(seed) for seed in range(4)}) == 4
    assert text(1, top_p=1e-6) == text(2, temperature=0)  # a nucleus of one is greedy


def test_an_answer_ends_at_the_end_of_sequence_token_unless_that_is_ignored(client, server):
    ask = {"model": server.name, "prompt": PROMPT, "max_tokens": 300, "temperature": 2}
    for seed in range(20):  # one token in 512 or so
        answer = client.completions.create(**ask, seed=seed)
        if answer.choices[0].finish_reason == "stop":
            break
    assert answer.usage.completion_tokens < 300 and answer.choices[0].finish_reason == "stop"
    longer = client.completions.create(**ask, seed=seed, extra_body={"ignore_eos": True})
    assert longer.usage.completion_tokens == 300 and longer.choices[0].finish_reason == "length"
    assert longer.choices[0].text.startswith(answer.choices[0].text.rstrip("\ufffd"))


def test_logprobs_of_a_completion(client, server, model_dir, tokenizer):
    answer = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text or any(t.startswith("bytes:") for t in logprobs.tokens)
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and max(top.values()) == top[token] == value < 0
    from tests.models.stepping import Stepper, build_spec
    from tkcc.engine.step import StepRequest
    from tkcc.models.checkpoint import load_config
    from tkcc.models.llama import build

    spec = build_spec(load_config(model_dir))
    stepper = Stepper(build(spec, load_weights(model_dir, "cpu", torch.float32), ()), spec)
    ids = tokenizer.encode(PROMPT)
    want_v = stepper.prefill(StepRequest(tuple(ids), 0, stepper.take_pages(len(ids))))[0].log_softmax(-1)
    assert logprobs.token_logprobs[0] == pytest.approx(float(want_v.max()), abs=1e-4)


def test_logprobs_of_a_chat(client, server):
    ask = {"model": server.name, "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    answer = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert (
        b"".join(bytes(e.bytes) for e in entries).decode(errors="ignore")
        in answer.choices[0].message.content + "\ufffd"
    )
    assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob == e.logprob for e in entries)
    streamed = client.chat.completions.create(**ask, logprobs=True, stream=True)
    tokens = [e.token for c in streamed if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert tokens == [e.token for e in entries]


def test_models_and_health(client, server):
    assert [card.id for card in client.models.list()] == [server.name]
    assert client.models.retrieve(server.name).id == server.name
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.admin_url}/health").json() == {"status": "ok"}


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REFUSED = [
    ("a field that is not honoured", CHAT, {"logit_bias": {"5": 1}}, "logit_bias", "is not supported"),
    ("several answers", CHAT, {"n": 2}, "n", "is not supported"),
    ("tools", CHAT, {"tools": [{"type": "function"}]}, "tools", "is not supported"),
    ("JSON mode", CHAT, {"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
    ("a field that is not known", CHAT, {"temprature": 1}, "temprature", "is not supported"),
    ("a field of the other endpoint", CHAT, {"prompt": "x"}, "prompt", "is not supported"),
    ("an image", CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "messages"),
    ("no messages", CHAT, {"messages": []}, "messages", "at least 1 item"),
    ("a role that is not known", CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages", "'robot'"),
    ("top_logprobs alone", CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ("too hot", TEXT, {"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ("text for a number", TEXT, {"temperature": "0"}, "temperature", "valid number"),
    ("not a number", TEXT, {"top_p": float("nan")}, "top_p", "not nan"),
    ("no token", TEXT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ("too many stops", TEXT, {"stop": ["a"] * 5}, "stop", "at most 4"),
    ("several prompts", TEXT, {"prompt": ["a", "b"]}, "prompt", "several prompts"),
    ("an empty prompt", TEXT, {"prompt": ""}, "prompt", "is empty"),
    ("no such token", TEXT, {"prompt": [1, 512]}, "prompt", "must be in [0, 512)"),
    ("a negative token", TEXT, {"prompt": [-1]}, "prompt", "must be in [0, 512)"),
    ("too long a prompt", TEXT, {"prompt": [5] * 512}, "prompt", "512 tokens; the maximum context is 512"),
    ("too long with its answer", TEXT, {"prompt": [5] * 500, "max_tokens": 13}, "max_tokens", "maximum context is 512"),
]


@pytest.mark.parametrize("case, path, fields, param, want", REFUSED, ids=[case for case, *_ in REFUSED])
def test_what_cannot_be_served_is_a_400_that_names_it(case, path, fields, param, want, server):
    asked = {"prompt": "x"} if path == TEXT else {"messages": MESSAGES}
    content = json.dumps({"model": server.name, **asked, **fields})
    answer = httpx.post(server.url + path, content=content)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and want in error["message"], error


@pytest.mark.parametrize(
    "case, method, path, content, status, want",
    [
        ("no JSON", "POST", TEXT, b"{", 400, "not valid JSON"),
        ("a list", "POST", TEXT, b"[1]", 400, "must be a JSON object"),
        ("another character set", "POST", TEXT, b"\xff\xfe", 400, "not valid JSON"),
        ("an unknown path", "GET", "/v1/nothing", None, 404, "Not Found"),
        ("another method", "GET", TEXT, None, 405, "Method Not Allowed"),
        ("another model", "POST", TEXT, b'{"model": "gpt-x", "prompt": "x"}', 404, "'gpt-x' does not exist"),
        ("an unknown model", "GET", "/v1/models/gpt-x", None, 404, "does not exist"),
    ],
)
def test_every_refusal_is_an_error_object(case, method, path, content, status, want, server):
    answer = httpx.request(method, server.url + path, content=content)
    assert answer.status_code == status and want in answer.json()["error"]["message"], case


def test_the_clients_exceptions_are_the_right_ones(client, server):
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model=server.name, prompt="x", logit_bias={"1": 1})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-x", prompt="x")


def test_neutral_values_of_unsupported_fields_are_let_through(client, server):
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "someone"}
    assert client.completions.create(model=server.name, prompt="x", max_tokens=1, **neutral).choices
    more = {"tools": [], "response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False}
    assert client.chat.completions.create(model=server.name, messages=MESSAGES, max_tokens=1, extra_body=more).choices
