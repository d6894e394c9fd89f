"""What is asked of vLLM through its address: advice on speculation."""

from __future__ import annotations

from foretoken import advise
from foretoken.model.names import model_folder

TARGET = str(model_folder("reference:target"))


def test_advice_on_vllm_as_it_runs(plain_url: str) -> None:
    report = advise(TARGET, url=plain_url, concurrency=(1, 2), prompts_per_slice=2, max_tokens=48, price_per_hour=1.0)
    assert report.results["answer"] in ("yes", "no", "only under this load", "only for these slices")
    assert {row.concurrency for row in report.results["rows"]} == {1, 2}
    assert {row.machine for row in report.results["costs_per_million"]} == {"this machine"}
