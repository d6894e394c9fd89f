"""Speculation seen through HTTP: answers are the target's, reports add up, and what is asked for is what is done."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from foretoken.backend.local import LocalBackend
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.text.detokenizer import Detokenizer
from tests.helpers.faults import expect
from tests.helpers.http import Records, client_of, events_of, run, text_of
from tests.helpers.usual import some_of
from tests.server.drafters import DRAFTERS, FEW, config_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "def read(self, path):\n    with open(path) as file:\n        return file.read()\n\ndef read_all("
SPECULATIVE = [name for name in DRAFTERS if name != "off"]
# Plain, a tree that is accepted in part, and a draft that is accepted whole; over HTTP the others are one of these.
USUAL = {"off", "tree", "synthetic_1.0"}


def ask(app: Any, *bodies: dict[str, Any], path: str = TEXT, status: int = 200) -> list[Any]:
    """The JSON of each answer, or the events of each stream; one after the other."""

    async def send() -> list[Any]:
        found = []
        async with client_of(app) as client:
            for body in bodies:
                response = await client.post(path, json=body)
                assert response.status_code == status, response.text
                found.append(events_of(response.text) if body.get("stream") else response.json())
        return found

    return run(send())


def greedy(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, **fields}


def near(found: Any, expected: Any, tolerance: float = 1e-3) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(near, found, expected))
    return abs(found - expected) < tolerance if isinstance(expected, float) else found == expected


@pytest.mark.parametrize("drafter", some_of(SPECULATIVE, {"ngram", "tree", "synthetic_0.5", "synthetic_1.0"}))
def test_lossless_greedy(backend: LocalBackend, drafter: str) -> None:
    """Case 42: over HTTP; tests/engine/test_exactness.py has all drafters and rules."""
    app = create_app(backend, config_for(drafter))
    plain, drafted = ask(app, *(greedy(logprobs=2, spec=spec) for spec in (DRAFTERS["off"], DRAFTERS[drafter])))
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert near(drafted["choices"][0]["logprobs"], plain["choices"][0]["logprobs"])
    assert drafted["foretoken"]["spec"]["num_drafted"] > 0
    assert plain["foretoken"]["spec"]["num_drafted"] == 0


@pytest.mark.parametrize("rate", some_of(["0.0", "0.5", "1.0"], {"0.5", "1.0"}))
def test_synthetic_0_and_1(backend: LocalBackend, rate: str) -> None:
    """Case 44: what is accepted is what the rate says, and the answer ends where it would have ended."""
    app = create_app(backend, config_for(f"synthetic_{rate}"))
    spec, plain = {"drafter": "synthetic"}, {"drafter": None}
    free, drafted = ask(app, *(greedy(ignore_eos=True, spec=one) for one in (plain, spec)))
    text, report = free["choices"][0]["text"], drafted["foretoken"]["spec"]
    assert drafted["choices"][0]["text"] == text
    accepted, counted = report["num_accepted"], report["num_drafted"] - report["num_cut"]
    assert counted > 0
    assert {"0.0": accepted == 0, "0.5": 0 < accepted < counted, "1.0": accepted == counted}[rate]
    for limits in ({"max_tokens": 7}, {"stop": [text[9:12]]}, FEATURES["grammar"], {"ignore_eos": False}):
        expected, found = ask(app, *({**greedy(ignore_eos=True), **limits, "spec": one} for one in (plain, spec)))
        assert found["choices"] == expected["choices"], limits
        assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"], limits


FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {"40": 5, "41": -100}},
    "bad_words": {"bad_words": ["self"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(250)), "skip_special_tokens": False},
    "stop_token_ids": {"stop_token_ids": list(range(0, 300, 7)), "include_stop_str_in_output": True},
    "min_tokens": {"min_tokens": 6},
    "grammar": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    },
    "logprobs": {"logprobs": 1},
    "n": {"n": 2},
    "stop": {"stop": ["\n"]},
    "seed": {"seed": 5},
    "echo": {"echo": True},
}


@pytest.mark.parametrize("drafter", some_of(SPECULATIVE, {"ngram", "tree", "synthetic_0.5"}))
def test_feature_cross(backend: LocalBackend, drafter: str) -> None:
    """Case 45: every pair of features with one drafter, every feature with every drafter; the answer is that of plain
    decoding.
    """
    app = create_app(backend, config_for(drafter))
    pairs = list(itertools.combinations(FEATURES, 2))[SPECULATIVE.index(drafter) % 4 :: 4]
    assert {name for pair in pairs for name in pair} == set(FEATURES)
    for first, second in pairs:
        body = greedy(max_tokens=7, **FEATURES[first] | FEATURES[second])
        # the shortest texts that the grammar allows have fewer tokens
        status = 400 if {first, second} == {"min_tokens", "grammar"} else 200
        plain, drafted = ask(app, *({**body, "spec": DRAFTERS[name]} for name in ("off", drafter)), status=status)
        if status == 400:
            assert plain["error"]["param"] == drafted["error"]["param"] == "min_tokens"
            continue
        for one, other in zip(plain["choices"], drafted["choices"], strict=True):
            assert one["text"] == other["text"], (first, second)
            assert one["finish_reason"] == other["finish_reason"], (first, second)
        assert plain["usage"]["completion_tokens"] == drafted["usage"]["completion_tokens"]


def check_trimmed(app: Any, body: dict[str, Any], stop: str) -> str:
    """Text, tokens, log-probabilities, usage and stream of one answer all end before `stop`; its text."""
    whole, events = ask(app, {**body, "logprobs": 0}, {**body, "stream": True})
    (choice,) = whole["choices"]
    assert stop not in choice["text"]
    assert choice["finish_reason"] == "stop"
    assert text_of(events) == choice["text"]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    ids = [one for event in events for one in (event["choices"][0].get("token_ids") or [])]
    assert ids == choice["token_ids"]
    return str(choice["text"])


@pytest.mark.parametrize("drafter", some_of(FEW, USUAL))
def test_stop_string_spanning(backend: LocalBackend, drafter: str) -> None:
    """Case 53."""
    app = create_app(backend, config_for(drafter))
    body = greedy(spec=DRAFTERS[drafter], max_tokens=20, return_token_ids=True)
    (free,) = ask(app, body)
    text = free["choices"][0]["text"]
    assert len(text) > 12
    for begin in (0, 1, 3, 5, 8):
        for length in (1, 4):
            stop = text[begin : begin + length]
            found = check_trimmed(app, {**body, "stop": [stop]}, stop)
            assert found == text[: text.index(stop)]
    overlapping = [text[4:9], text[6:8]]
    found = check_trimmed(app, {**body, "stop": overlapping}, text[6:8])
    assert found in [text[: text.index(stop)] for stop in overlapping]
    assert found == check_trimmed(app, {**body, "stop": overlapping, "spec": DRAFTERS["off"]}, text[6:8])


@pytest.mark.parametrize("drafter", some_of(DRAFTERS, USUAL))
def test_utf8_split(backend: LocalBackend, drafter: str) -> None:
    """Case 54: characters of several tokens each, forced one token after the other."""
    assert backend.engine.llm.tokenizer is not None
    for wanted in ("\U0001f468\u200d\U0001f469\u200d\U0001f467", "한국어", "é😀猫"):
        ids = backend.engine.llm.tokenizer.encode(wanted)
        assert len(ids) > len(wanted)
        app = create_app(backend, config_for(drafter))
        pattern = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": wanted}}}
        body = {"prompt": f'"{wanted}" "{wanted}" "', "temperature": 0, "max_tokens": 40, "response_format": pattern}
        whole, events = ask(app, *({**body, "spec": DRAFTERS[drafter], "stream": flag} for flag in (False, True)))
        text = whole["choices"][0]["text"]
        assert text == text_of(events) == f'"{wanted}"'
        assert "\ufffd" not in "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("drafter", some_of(DRAFTERS, USUAL))
def test_utf8_that_breaks(backend: LocalBackend, drafter: str) -> None:
    """Case 54: bytes that are no character, at the beginning of the answer and inside: the stream is the answer."""
    tokenizer = backend.engine.llm.tokenizer
    assert tokenizer is not None
    parts = tokenizer.encode("\U0001f468", add_special_tokens=False)
    assert len(parts) > 1
    app = create_app(backend, config_for(drafter))
    for prompt, forced in ((parts[:1], parts[0]), (parts, parts[-1]), (parts[:1], parts[-1])):
        body = {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 9,
            "ignore_eos": True,
            "logit_bias": {str(forced): 100},
        }
        whole, events = ask(app, *({**body, "spec": DRAFTERS[drafter], "stream": flag} for flag in (False, True)))
        assert whole["usage"]["completion_tokens"] == 9
        assert "\ufffd" in whole["choices"][0]["text"]
        assert text_of(events) == whole["choices"][0]["text"]


def test_a_decoder_that_fails_ends_its_request_alone(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 54: an exception in the decoder, at the third token of one of two requests of a batch, streamed and not."""
    app, push = create_app(backend), Detokenizer.push
    (fine,) = ask(app, greedy())
    broken = greedy(logit_bias={"40": 100})

    def failing(self: Detokenizer, token_id: int) -> str:
        if token_id == 40:
            expect("the decoder")
            raise RuntimeError("no such byte")
        return push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", failing)

    async def both(**fields: Any) -> list[Any]:
        async with client_of(app) as client:
            posts = (client.post(TEXT, json={**body, **fields}) for body in (greedy(), broken))
            return list(await asyncio.gather(*posts))

    good, bad = run(both())
    assert good.json()["choices"] == fine["choices"]
    assert (bad.status_code, bad.json()["error"]["code"]) == (500, "engine_error")
    assert bad.headers["x-should-retry"] == "false"
    good, bad = run(both(stream=True))
    assert text_of(events_of(good.text)) == fine["choices"][0]["text"]
    code = bad.json()["error"]["code"] if bad.status_code == 500 else events_of(bad.text)[-1]["error"]["code"]
    assert code == "engine_error"


@pytest.mark.parametrize("drafter", some_of(FEW, USUAL))
def test_max_tokens_inside_run(backend: LocalBackend, drafter: str) -> None:
    """Case 55."""
    app = create_app(backend, config_for(drafter))
    spec = DRAFTERS[drafter]
    for count in (1, 2, 3, 5, 7):
        (found,) = ask(app, greedy(max_tokens=count, ignore_eos=True, spec=spec))
        assert found["usage"]["completion_tokens"] == count
        assert found["choices"][0]["finish_reason"] == "length"
    assert backend.info.max_model_len == 2048
    (found,) = ask(app, {"prompt": [100, 101, 102] * 681, "max_tokens": 50, "ignore_eos": True, "spec": spec})
    assert found["usage"]["total_tokens"] == backend.info.max_model_len
    assert found["choices"][0]["finish_reason"] == "length"
    (found,) = ask(app, greedy(min_tokens=9, max_tokens=12, stop=["e", " ", "\n"], spec=spec))
    assert 9 <= found["usage"]["completion_tokens"] <= 12


def prediction(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


@pytest.mark.parametrize("drafter", some_of(["default", *FEW], {"default", "off", "tree"}))
def test_prediction_api(backend: LocalBackend, drafter: str) -> None:
    """Case 57: the answer is the same with it; every token of it is accepted or rejected."""
    app = create_app(backend, config_for(drafter))
    spec = {} if drafter == "default" else {"spec": DRAFTERS[drafter]}
    body = greedy(max_tokens=16, ignore_eos=True, **spec)
    (free,) = ask(app, body)
    text = free["choices"][0]["text"]
    assert "accepted_prediction_tokens" not in free["usage"]["completion_tokens_details"]
    half = text[: len(text) // 2] + " and then something else entirely\n" + text[len(text) // 2 :]
    is_used = drafter != "off"
    for content in (text, half, [{"type": "text", "text": text}]):
        (found,) = ask(app, {**body, "prediction": prediction(content)})
        assert found["choices"][0]["text"] == text
        details = found["usage"]["completion_tokens_details"]
        num_tokens = len(backend.engine.llm.encode_plain("prediction", content if isinstance(content, str) else text))
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == num_tokens
        if content == text and is_used:
            assert details["accepted_prediction_tokens"] >= 13
            assert found["foretoken"]["spec"]["num_steps"] < 11
        if not is_used:
            assert details["accepted_prediction_tokens"] == 0
    stopped, n = ask(
        app,
        {**body, "stop": [text[9:12]], "prediction": prediction(text)},
        {**body, "n": 2, "prediction": prediction(text)},
    )
    assert stopped["choices"][0]["text"] == text[: text.index(text[9:12])]
    assert [choice["text"] for choice in n["choices"]] == [text] * 2
    for empty in (None, prediction(""), prediction(None), prediction([])):
        (found,) = ask(app, {**body, "prediction": empty})
        counts = (found["usage"]["completion_tokens_details"].get(f"{kind}_prediction_tokens") for kind in KINDS)
        assert list(counts) == ([None, None] if empty is None else [0, 0])


KINDS = ("accepted", "rejected")


def test_prediction_that_is_refused_or_disabled(backend: LocalBackend) -> None:
    """Case 57."""
    app = create_app(backend)
    (found,) = ask(app, greedy(prediction=prediction("word " * 200_000)), status=400)
    assert found["error"]["param"] == "prediction"
    for wrong in (3, "text", {"content": "a"}, prediction(3), prediction([{"type": "image"}]), prediction(["a"])):
        (found,) = ask(app, greedy(prediction=wrong), status=400)
        assert found["error"]["param"] == "prediction"
    disabled = create_app(backend, ApiConfig(predictions=False))
    (found,) = ask(disabled, greedy(prediction=prediction("def read(")))
    details = found["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 0
    assert details["rejected_prediction_tokens"] > 0
    assert found["foretoken"]["spec"]["why_off"] == "prediction_disabled"


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "drafters",
    [("off", "ngram", "tree", "synthetic_0.5"), pytest.param(tuple(DRAFTERS), marks=pytest.mark.repeated)],
    ids=["some", "all"],
)
def test_usage_conservation(backend: LocalBackend, drafters: tuple[str, ...]) -> None:
    """Case 58: responses, records, the engine's totals and the trace count the same tokens."""
    records, engine = Records(), backend.engine.llm
    totals = []
    before = engine.stats.as_dict()
    for drafter in drafters:
        spec, app = DRAFTERS[drafter], create_app(backend, config_for(drafter), [records])
        bodies = [
            greedy(spec=spec, foretoken={"trace": True, "metrics": "detailed"}),
            greedy(spec=spec, n=2, temperature=1, seed=3, foretoken={"trace": True}, return_token_ids=True),
            greedy(spec=spec, stop=["file"], foretoken={"trace": True}, **STREAMED),
        ]
        first, second, third = ask(app, *bodies)
        check_metrics(first)
        totals += [check_report(found) for found in (first, second, third[-1])]
        check_trace(first, first["foretoken"]["trace"])
        check_trace(second, second["foretoken"]["trace"])
        streamed = [one for event in third for one in event.get("foretoken", {}).get("trace", ())]
        check_trace(third[-1], streamed)
    after = engine.stats.as_dict()
    for place, name in enumerate(("num_emitted", "num_drafted", "num_accepted", "num_rejected")):
        assert sum(total[place] for total in totals) == after[name] - before[name], name
        assert sum(one[name] for record in records.all for one in record.stats) == after[name] - before[name], name


def check_report(found: Any) -> tuple[int, int, int, int]:
    report, used, timings = found["foretoken"]["spec"], found["usage"], found["timings"]
    assert report["num_drafted"] == report["num_accepted"] + report["num_rejected"] + report["num_cut"]
    assert report["num_emitted"] == used["completion_tokens"] == timings["predicted_n"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (report["num_drafted"], report["num_accepted"])
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    cached = used["prompt_tokens_details"]
    assert cached["cached_tokens"] + cached["cache_write_tokens"] == used["prompt_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == used["prompt_tokens"]
    assert sum(one["num_drafted"] for one in report["by_drafter"].values()) == report["num_drafted"]
    return report["num_emitted"], report["num_drafted"], report["num_accepted"], report["num_rejected"]


def check_metrics(found: Any) -> None:
    metrics, report = found["metrics"], found["foretoken"]["spec"]
    assert sum(metrics["per_step_accepted"]) == report["num_accepted"]
    assert sum(metrics["per_step_drafted"]) == report["num_drafted"]
    assert ("mean_itl_ms" in metrics) == (report["num_emitted"] > 1)  # one token has no neighbour
    spec = metrics["speculative_decoding"]
    if not report["num_drafts"]:
        assert spec is None
        return
    histogram = spec["acceptance_histogram"]
    assert sum(histogram) == spec["num_spec_steps"] == report["num_drafts"]
    assert sum(place * count for place, count in enumerate(histogram)) == report["num_accepted"]
    assert spec["mean_acceptance_length"] == pytest.approx(1 + report["num_accepted"] / report["num_drafts"])
    assert spec["draft_acceptance_rate"] == pytest.approx(report["num_accepted"] / report["num_drafted"])


def check_trace(found: Any, trace: Sequence[Any]) -> None:
    report = found["foretoken"]["spec"]
    emitted = [token for record in trace for token in record["emitted"]]
    assert len(emitted) == found["usage"]["completion_tokens"]
    assert sum(token["kind"] == "accepted" for token in emitted) == report["num_accepted"]
    assert sum(len(draft["ids"]) for record in trace for draft in record["drafts"]) == report["num_drafted"]
    assert sum(record["num_accepted"] for record in trace) == report["num_accepted"]
    for record in trace:
        assert record["batch_size"] >= 1
        assert record["t_ms"] > 0
        if not record["drafts"]:
            assert record["why"] in ("off_request", "prefill", "no_match", "length_clamped")
