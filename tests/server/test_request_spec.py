"""What a request may ask for of speculation, and what it may not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foretoken import SpecConfig
from foretoken.backend.local import LocalBackend
from foretoken.registry import DRAFTERS as DRAFTERS_OF_THE_PACKAGE
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from tests.helpers.fake_backend import FakeBackend
from tests.helpers.http import client_of, run
from tests.helpers.usual import some_of
from tests.server.drafters import DRAFTERS, FEW, config_for
from tests.server.test_speculation_over_http import CHAT, TEXT, USUAL, ask, greedy, prediction


def spec_for(config: ApiConfig | None = None, default: dict[str, Any] | None = None, **fields: Any) -> SpecConfig:
    """The configuration that a request runs with."""
    fake = FakeBackend()
    assert fake.info is not None
    if default is not None:
        fake.info = msgspec.structs.replace(fake.info, default_spec=SpecConfig(**default))
    ask(create_app(fake, config), {"prompt": "a", **fields})
    spec = fake.calls[-1].spec
    assert spec is not None
    return spec


def test_a_request_chooses_its_drafter() -> None:
    draft = {"drafter": "draft_model", "draft": "reference:draft", "num_draft": 3}
    assert spec_for() == SpecConfig()
    assert spec_for(default=draft) == SpecConfig(**draft)
    assert spec_for(default=draft, spec={"drafter": None}) == SpecConfig()
    assert spec_for(default=draft, spec={"num_draft": 0}) == SpecConfig()
    assert spec_for(default=draft, spec={"num_draft": 5}) == SpecConfig("draft_model", "reference:draft", num_draft=5)
    assert spec_for(spec={"drafter": "ngram", "num_draft": "auto"}) == SpecConfig("ngram")
    assert spec_for(spec={"drafter": "ngram", "rule": "coupled"}).rule == "coupled"
    for alias in ("num_draft_tokens", "draft_num_predict", "speculative.n_max"):
        assert spec_for(default=draft, **{alias: 7}).num_draft == 7
    assert spec_for(prediction=prediction("a")) == SpecConfig("predicted")
    assert spec_for(prediction=prediction("a"), spec={"drafter": None}) == SpecConfig()
    assert spec_for(default=draft, prediction=prediction("a")).leaves == {"predicted", "draft_model"}
    for name, traits in DRAFTERS_OF_THE_PACKAGE.items():  # a prediction joins any drafter that a request may name
        if traits.is_lookup and name != "predicted":
            spec = {"drafter": name, "num_draft": 3}
            assert spec_for(prediction=prediction("a"), spec=spec).leaves == {"predicted", name}


def refusal(config: ApiConfig | None = None, **fields: Any) -> Any:
    (found,) = ask(create_app(FakeBackend(), config), {"prompt": "a", **fields}, status=400)
    return found["error"]


def test_what_a_request_may_not_choose() -> None:
    assert refusal(spec={"drafter": "draft_model"})["code"] == "unsupported_feature"
    assert refusal(spec={"drafter": "medusa9"})["param"] == "spec.drafter"
    assert refusal(spec={"drafter": "ngram", "rule": "typical"})["param"] == "spec.rule"
    assert refusal(spec={"drafter": "ngram", "rule": "magic"})["param"] == "spec.rule"
    assert refusal(spec={"rule": "magic"})["param"] == "spec.rule"
    assert refusal(spec={"num_draft": 3}, num_draft_tokens=4)["param"] == "spec.num_draft"
    assert refusal(num_draft_tokens=3, draft_num_predict=4)["param"] == "spec.num_draft"
    assert refusal(spec={"drafter": None, "num_draft": 3})["param"] == "spec.num_draft"
    assert refusal(spec={"draft": "/etc/passwd"})["param"] == "spec.draft"
    lossy = ApiConfig(allow_lossy=True)
    assert refusal(lossy, spec={"drafter": "ngram", "rule": "typical", "exact": True})["param"] == "spec.exact"
    assert spec_for(lossy, spec={"drafter": "ngram", "rule": "typical"}).allow_lossy


def test_settings_of_a_request_reach_the_engine() -> None:
    fake = FakeBackend()
    ask(
        create_app(fake),
        {"prompt": "a", "service_tier": "flex", "cache_salt": "s", "metadata": {"slice": "code"}, "request_id": "r-1"},
        {"prompt": "a", "service_tier": "priority", "foretoken": {"slice": "chat"}},
        {"prompt": "a", "priority": 3, "service_tier": "auto"},
    )
    first, second, third = (call.params for call in fake.calls)
    assert (first.priority, first.tenant, first.slice) == (10, "\0s", "code")
    assert (second.priority, second.tenant, second.slice) == (-10, "", "chat")
    assert third.priority == 3
    (found,) = ask(create_app(fake), {"prompt": "a", "service_tier": "auto", "request_id": "r-2"})
    assert (found["service_tier"], found["id"]) == ("default", "cmpl-r-2")
    ask(create_app(fake), {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"}, path=CHAT)
    assert fake.calls[-1].template_options == {"reasoning_effort": "low"}
    (refused,) = ask(
        create_app(fake),
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": True}},
        path=CHAT,
        status=400,
    )
    assert refused["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("drafter", some_of(FEW, USUAL))
def test_padded_chunks_have_one_size(backend: LocalBackend, drafter: str) -> None:
    """Case 59: with bursts and with log-probabilities."""
    app = create_app(backend, config_for(drafter, obfuscation=True))
    body = greedy(spec=DRAFTERS[drafter], stream=True, stream_options={"include_usage": True})

    async def sizes(**fields: Any) -> list[int]:
        async with client_of(app) as client:
            response = await client.post(TEXT, json={**body, **fields})
            return [len(part) + 2 for part in response.content.split(b"\n\n") if part and b"[DONE]" not in part]

    assert len(set(run(sizes())[:-1])) == 1
    assert len(set(run(sizes(logprobs=3))[:-1])) == 1
    plain = run(sizes(stream_options={"include_obfuscation": False}))
    assert len(set(plain)) > 1
