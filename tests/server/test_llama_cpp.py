"""llama.cpp's interface over a scripted backend: what is asked, what becomes of an answer, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretoken.backend.call import Backend, Begun, ModelInfo, TextToEncode
from foretoken.backend.local import LocalBackend
from foretoken.errors import ContextLengthError
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.observe.config import ObserveConfig
from foretoken.server.observe.observation import Observation
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.fake_backend import INFO, FakeBackend, ended, piece
from tests.helpers.foreign_tokenizers import foreign_tokenizer
from tests.helpers.http import JSON, client_of, run

ON = ApiConfig(llama_cpp=True)


def ask(backend: Backend, path: str, body: Any = None, config: ApiConfig = ON) -> tuple[int, Any]:
    """Status, and JSON, or the events of a stream."""

    async def send() -> tuple[int, Any]:
        async with client_of(create_app(backend, config)) as client:
            if body is None:
                response = await client.get(path)
            else:
                response = await client.post(path, content=json.dumps(body).encode(), headers=JSON)
            if response.headers["content-type"].startswith("text/event-stream"):
                return response.status_code, [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
            return response.status_code, response.json()

    return run(send())


def asked(body: Any, path: str = "/completion", info: ModelInfo = INFO) -> Any:
    """The call that a body becomes."""
    backend = FakeBackend(info=info)
    status, found = ask(backend, path, body)
    assert status == 200, found
    return backend.calls[0]


def test_what_is_drawn_is_what_llama_cpp_draws() -> None:
    params = asked({"prompt": "ab"}).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.seed, params.max_tokens) == (None, INFO.max_model_len)
    body = {"n_predict": 9, "temperature": 0, "top_k": 3, "seed": 5, "stop": ["x"], "repeat_penalty": 1.5, "n_probs": 2}
    params = asked({"prompt": "ab", "model": "any name", "logit_bias": [[7, -3], ["ab", 2]]} | body).params
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (9, 0, 3, 5)
    assert (list(params.stop), params.repetition_penalty, params.logprobs) == (["x"], 1.5, 2)
    assert params.logit_bias == {7: -3, 0: 2, 1: 2}
    assert asked({"prompt": "a", "logit_bias": {"12": -1}}).params.logit_bias == {12: -1}
    assert asked({"prompt": "a", "seed": -1, "n_predict": -1}).params.max_tokens == INFO.max_model_len


def test_what_the_server_draws_with_where_a_request_says_nothing() -> None:
    config = ApiConfig(llama_cpp=True, default_temperature=0.25, default_seed=9)
    backend = FakeBackend()
    for body in ({}, {"seed": 3, "temperature": 1}, {"seed": -1}):
        status, found = ask(backend, "/completion", {"prompt": "ab"} | body, config)
        assert (status, found["generation_settings"]["seed"]) == (200, backend.calls[-1].params.seed)
    default, named, another = (call.params for call in backend.calls)
    assert (default.temperature, default.seed, default.top_k) == (0.25, 9, 40)
    assert (named.temperature, named.seed) == (1, 3)
    assert another.seed not in (None, 9)
    settings = ask(backend, "/props", None, config)[1]["default_generation_settings"]["params"]
    assert (settings["temperature"], settings["seed"], settings["min_p"]) == (0.25, 9, 0.05)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("abc", [[0, 1, 2]]),
        ([5, 6], [[5, 6]]),
        ([5, "ab", 6], [[5, 0, 1, 6]]),
        ([[5, 6], "ab", {"prompt_string": "a"}], [[5, 6], [0, 1], [0]]),
        ({"prompt_string": "ab"}, [[0, 1]]),
    ],
)
def test_prompts(prompt: Any, ids: list[list[int]]) -> None:
    script = [Begun(tuple(map(tuple, ids))), *(one for place in range(len(ids)) for one in (piece(place, "x"),))]
    backend = FakeBackend([*script, *(ended(place, "x", num_tokens=1) for place in range(len(ids)))])
    status, found = ask(backend, "/completions", {"prompt": prompt})
    assert status == 200
    assert [list(one) for one in backend.calls[0].prompts] == ids
    assert isinstance(found, list) == (len(ids) > 1)


def test_a_stream_is_the_answer() -> None:
    status, whole = ask(FakeBackend(), "/completion", {"prompt": "ab", "return_tokens": True, "n_probs": 1})
    assert (status, whole["content"], whole["tokens"], whole["stop_type"]) == (200, "Hello", [7, 7], "eos")
    assert (whole["prompt"], whole["tokens_evaluated"], whole["tokens_predicted"]) == ("\x00\x01", 3, 2)
    assert [entry["id"] for entry in whole["completion_probabilities"]] == [7, 7]
    _, events = ask(FakeBackend(), "/completion", {"prompt": "ab", "stream": True})
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False, False, True]
    assert [event["tokens"] for event in events] == [[7], [7], []]
    timings = events[-1]["timings"]
    assert timings["predicted_n"] == 2
    assert timings["predicted_per_token_ms"] == timings["predicted_ms"]  # the first one came with the prompt


def test_what_ended_an_answer() -> None:
    """A stop string, the one that the last token completed; a structure that was complete; the length."""
    words = {"prompt": "ab", "stop": ["x", "lo", "o"]}
    for body, reason, found in (
        (words, "stop", ("word", "lo")),
        (words | {"grammar": 'root ::= "Hello"', "stop": ["x"]}, "stop", ("eos", "")),
        (words, "length", ("limit", "")),
    ):
        backend = FakeBackend([Begun(((1, 2),)), piece(0, "Hel"), piece(0, "lo", 1), ended(0, "Hel", reason)])
        for asked_for in (body, body | {"stream": True}):
            answer = ask(backend, "/completion", asked_for)[1]
            last = answer[-1] if isinstance(answer, list) else answer
            assert (last["stop_type"], last["stopping_word"]) == found


def test_fields_are_chosen() -> None:
    fields = ["content", "generation_settings/n_predict", "no/such"]
    _, found = ask(FakeBackend(), "/completion", {"prompt": "a", "n_predict": 3, "response_fields": fields})
    assert found == {"content": "Hello", "generation_settings/n_predict": 3}


def test_a_text_is_filled_in() -> None:
    info = msgspec.structs.replace(INFO, fim_tokens=((90,), 91, 92))
    body = {"input_prefix": "ab", "input_suffix": "c", "prompt": "d"}
    assert list(asked(body, "/infill", info).prompts[0]) == [90, 0, 1, 91, 0, 92, 0]
    extra = {"input_extra": [{"text": "x", "filename": "f"}]}
    assert len(asked(body | extra, "/infill", info).prompts[0]) == 7 + len("--- f ---\nx\n")
    assert ask(FakeBackend(), "/infill", body)[0] == 400


def test_what_is_told_of_the_server() -> None:
    info = msgspec.structs.replace(INFO, max_batch_size=3)
    _, props = ask(FakeBackend(info=info), "/props")
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (3, INFO.max_model_len)
    _, slots = ask(FakeBackend(info=info), "/slots")
    assert [(slot["id"], slot["is_processing"]) for slot in slots] == [(0, False), (1, False), (2, False)]
    assert ask(FakeBackend(), "/models")[1]["data"][0]["id"] == "fake"


@pytest.mark.parametrize("path", ["/slots", "/metrics"])
def test_what_the_operator_has_closed(path: str) -> None:
    """As in llama.cpp, whose clients ask for the status; without its interface there is no such route."""
    for is_llama, expected in ((True, 501), (False, 404)):
        config = ApiConfig(llama_cpp=is_llama, slots=False, metrics=False)
        retried = "false" if is_llama else None
        observation = Observation(FakeBackend(), ObserveConfig(request_log="none"))

        async def send(config: ApiConfig = config, observation: Observation = observation) -> Any:
            app = create_app(FakeBackend(), config, (), observation.routers)
            async with client_of(app) as client:
                return await client.get(path)

        response = run(send())
        assert (response.status_code, response.headers.get("x-should-retry")) == (expected, retried)
        assert "message" in response.json()["error"]
        observation.close()


def test_tokens_of_a_text() -> None:
    assert ask(FakeBackend(), "/tokenize", {"content": "abc"}) == (200, {"tokens": [0, 1, 2]})
    pieces = {"tokens": [{"id": 0, "piece": "\x00"}]}
    assert ask(FakeBackend(), "/tokenize", {"content": "a", "with_pieces": True}) == (200, pieces)
    assert ask(FakeBackend(), "/detokenize", {"tokens": [97, 98]}) == (200, {"content": "ab"})
    assert ask(FakeBackend(), "/detokenize", {"tokens": [99999]})[0] == 400


class Counting(FakeBackend):
    """Counts the texts that it is asked to tokenise, and the tokens that it spells."""

    num_asked = 0

    async def tokenize(self, *given: Any, **named: Any) -> list[int]:
        self.num_asked += 1
        return await super().tokenize(*given, **named)

    async def detokenize(self, *given: Any, **named: Any) -> str:
        self.num_asked += 1
        return await super().detokenize(*given, **named)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/completion", {"prompt": ["a"] * 1025}),
        ("/completion", {"prompt": [5, *["a"] * INFO.max_model_len]}),
        ("/completion", {"prompt": "a", "logit_bias": [["a", 1]] * 1025}),
        ("/v1/completions", {"prompt": ["a"] * 1025, "suffix": "b"}),
    ],
)
def test_too_much_is_refused_before_it_is_tokenised(path: str, wrong: dict[str, Any]) -> None:
    """Each text is a question to the engine's process: a body has room for a million of them."""
    backend = Counting(info=msgspec.structs.replace(INFO, fim_tokens=((90,), 91, 92)))
    status, found = ask(backend, path, wrong)
    assert (status, found["error"]["param"]) == (400, list(wrong)[-1] if "suffix" not in wrong else "prompt")
    assert backend.num_asked <= 1


def test_a_token_is_spelt_once() -> None:
    backend = Counting()
    backend.tokenize = lambda *_given, **_named: asyncio.sleep(0, [97, 98] * 500)  # type: ignore[method-assign]
    found = ask(backend, "/tokenize", {"content": "ab" * 500, "with_pieces": True})[1]
    assert found["tokens"] == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}] * 500
    assert backend.num_asked <= 4  # a text in front of them was encoded and decoded too


class Spelling(FakeBackend):
    """Tokenises with a tokenizer of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    async def tokenize(self, text: TextToEncode) -> list[int]:
        return self._tokenizer.encode(text.prompt or "", text.add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], has_specials: bool = False) -> str:
        return self._tokenizer.decode(token_ids, has_specials)


def test_a_piece_keeps_the_space_of_its_word(tmp_path: Path) -> None:
    """SentencePiece drops it at the beginning of a text, and a piece is a part of one."""
    tokenizer = load_tokenizer(foreign_tokenizer(tmp_path, "sentencepiece"))
    assert tokenizer is not None
    text = "the cat  sat \x07"
    tokens = ask(Spelling(tokenizer), "/tokenize", {"content": text, "with_pieces": True, "add_special": True})[1]
    written = [token["piece"] for token in tokens["tokens"]]
    assert written[0] == "<s>"
    assert "".join(written[1:]) == " " + text
    ids = [token["id"] for token in tokens["tokens"]]
    assert ask(Spelling(tokenizer), "/detokenize", {"tokens": ids[1:]}) == (200, {"content": " " + text})
    assert ask(Spelling(tokenizer), "/detokenize", {"tokens": ids}) == (200, {"content": "<s> " + text})
    assert ask(Spelling(tokenizer), "/detokenize", {"tokens": []}) == (200, {"content": ""})
    assert ask(Spelling(tokenizer), "/tokenize", {"content": "", "with_pieces": True}) == (200, {"tokens": []})


def test_a_conversation_as_its_template_lays_it_out(backend: LocalBackend) -> None:
    """With special tokens as they are spelt, and thinking unless a request says otherwise, as in llama.cpp."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}

    def prompt(**fields: Any) -> Any:
        status, found = ask(backend, "/apply-template", chat | fields)
        return found["prompt"] if status == 200 else (status, found["error"]["param"])

    assert prompt() == "<|user|>hi\n<think><|assistant|>"
    assert prompt(add_generation_prompt=False) == "<|user|>hi\n<think>"
    assert prompt(chat_template_kwargs={"enable_thinking": False}) == "<|user|>hi\n<|assistant|>"
    begun = [*chat["messages"], {"role": "assistant", "content": "Well"}]
    assert prompt(messages=begun) == "<|user|>hi\n<|assistant|>Well"
    assert prompt(messages=begun, add_generation_prompt=True) == "<|user|>hi\n<|assistant|>Well\n<think><|assistant|>"
    assert prompt(messages=[]) == (400, "messages")
    _, whole = ask(backend, "/tokenize", {"content": prompt()})
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        assert ask(backend, path, chat) == (200, {"input_tokens": len(whole["tokens"])})
    assert ask(backend, "/detokenize", {"tokens": [0]}) == (200, {"content": "<|endoftext|>"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_predict": 0},
        {"mirostat": 2},
        {"typical_p": 0.5},
        {"samplers": ["top_k"]},
        {"post_sampling_probs": True},
        {"n": 2},
        {"prompt": []},
        {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}},
        {"logit_bias": [[1]]},
        {"logit_bias": [[-1, 2]]},
        {"grammar": "root ::= this is (not"},
    ],
)
def test_what_is_not_done_is_refused_by_name(wrong: dict[str, Any]) -> None:
    status, found = ask(FakeBackend(), "/completion", {"prompt": "a"} | wrong)
    assert (status, found["error"]["code"]) == (400, 400)
    assert found["error"]["param"] == next(iter(wrong))


def test_grammars_and_schemas_hold_chats_too() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert "start:" in asked(chat | {"grammar": 'root ::= "a"{5,5}'}, "/chat/completions").params.grammar
    schemas = ({"json_schema": {"const": 1}}, {"response_format": {"type": "json_object", "schema": {"const": 1}}})
    for body in schemas:
        assert json.loads(asked(chat | body, "/v1/chat/completions").params.json_schema) == {"const": 1}


def test_a_prompt_that_is_too_long() -> None:
    backend = FakeBackend()
    backend.refusal = ContextLengthError("prompt", "9 tokens", "is too long")
    status, found = ask(backend, "/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert (status, found["error"]["type"]) == (400, "exceed_context_size_error")
    assert (found["error"]["n_prompt_tokens"], found["error"]["n_ctx"]) == (9, INFO.max_model_len)


def test_a_response_has_every_field_of_open_responses() -> None:
    """And a reasoning item, which agents send back, is no part of the chat."""
    turns = [{"type": "reasoning", "summary": []}, {"role": "user", "content": "hi"}]
    backend = FakeBackend()
    status, found = ask(backend, "/v1/responses", {"input": turns, "prompt_cache_key": "k"}, ApiConfig())
    assert status == 200
    assert backend.calls[0].messages == [{"role": "user", "content": "hi"}]
    required = "background frequency_penalty max_tool_calls presence_penalty prompt_cache_key safety_identifier"
    assert {name: found[name] for name in required.split()} == {
        "background": False,
        "frequency_penalty": 0,
        "max_tool_calls": None,
        "presence_penalty": 0,
        "prompt_cache_key": "k",
        "safety_identifier": None,
    }
    assert found["service_tier"] == "default"


def test_a_form_in_a_response_has_every_field_of_open_responses() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"const": None}}
    _, found = ask(FakeBackend(), "/v1/responses", {"input": "hi", "text": {"format": form}}, ApiConfig())
    assert found["text"] == {"format": form | {"description": None, "strict": False}}


def test_it_is_off_unless_asked_for() -> None:
    off = ApiConfig()
    assert ask(FakeBackend(), "/completion", {"prompt": "a"}, off)[0] == 404
    assert ask(FakeBackend(), "/v1/completions", {"prompt": "a", "model": "another"}, off)[0] == 404
