"""`foretoken plan`: what fits, which draft, and exit code 1 with what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken.errors import InputError
from foretoken.machine import memory
from foretoken.machine.memory import GroupMemory, available_bytes, group_memory, parse_bytes
from foretoken.measure.speed.profile import write_profile
from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.simulate.fleet import day as days
from foretoken.simulate.fleet import plan as fleet_plan
from tests.cli.conftest import Run
from tests.helpers.checkpoints import tiny_checkpoint


def test_what_fits_is_told_and_what_does_not_is_exit_code_1(foretoken: Run, pair: SimpleNamespace) -> None:
    """The same question with one byte less usable memory: refused, one byte missing."""
    common = [
        "plan",
        "-t",
        pair.target,
        "--draft",
        pair.draft,
        "--batch",
        4,
        "--context",
        100,
        "--num-draft",
        3,
        "--reserve",
        0,
        "--json",
    ]
    done = foretoken(*common, "--memory", "1GiB")
    found = json.loads(done.lines[-1])
    (row,) = found["rows"]
    assert (done.code, row["fits"], found["cache_tokens"]) == (0, True, 4 * 128)
    parts = [
        row[name] for name in ("weight_bytes", "draft_weight_bytes", "kv_bytes", "draft_kv_bytes", "workspace_bytes")
    ]
    assert sum(parts) == row["total_bytes"]
    assert foretoken(*common, "--memory", row["total_bytes"]).code == 0
    refused = foretoken(*common, "--memory", row["total_bytes"] - 1)
    assert refused.code == 1
    assert "1 bytes are missing; at this length 3 requests fit" in refused.err
    assert json.loads(refused.lines[-1])["rows"][0]["missing_bytes"] == 1


def test_which_of_several_drafts_fits(foretoken: Run, pair: SimpleNamespace, tmp_path: Path) -> None:
    large = tiny_checkpoint(tmp_path / "large", "llama", num_hidden_layers=40)
    common = ["plan", "-t", pair.target, "--draft", large, "--draft", pair.draft, "--context", 64, "--num-draft", 2]
    done = foretoken(*common, "--memory", "3MB", "--json")
    found = json.loads(done.lines[-1])
    assert [row["fits"] for row in found["rows"]] == [False, True]
    assert (done.code, found["table_draft"]) == (0, str(pair.draft))
    assert foretoken(*common, "--memory", "500kB").code == 1


def test_for_the_eye(foretoken: Run, pair: SimpleNamespace) -> None:
    done = foretoken("plan", "-t", pair.target, "--memory", "8MB", "--context", 256, "--num-draft", 4)
    assert done.code == 0
    assert "cpu: 7.629 MiB, of which 6.104 MiB may be used" in done.out
    assert "fits" in done.out
    assert "MiB" in done.out.split("(down)")[1]
    assert done.lines[-1].strip() == "to run it: --cache-tokens 256"


def test_heads_in_few_bits_beside_a_draft(foretoken: Run) -> None:
    """A row for each; bytes by format; nothing is kept of a position for Medusa heads."""
    common = ["plan", "--head", "reference:eagle", "--head", "reference:medusa", "--memory", "1GiB", "--json"]

    def rows(*more: str) -> dict[str, dict[str, int]]:
        return {row["draft"]: row for row in json.loads(foretoken(*common, *more).lines[-1])["rows"]}

    found = rows("--draft", "reference:draft")
    assert set(found) == {"reference:draft", "reference:eagle", "reference:medusa"}
    assert found["reference:eagle"]["draft_kv_bytes"] > found["reference:medusa"]["draft_kv_bytes"] == 0
    sizes = [
        rows("--draft-dtype", kind)["reference:eagle"]["draft_weight_bytes"] for kind in ("bfloat16", "int8", "int4")
    ]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    assert rows("--weights", "int4")["reference:eagle"]["draft_weight_bytes"] == sizes[2]  # as many bits as the target
    assert foretoken("plan", "--head", "reference:draft").code == 3
    refused = foretoken("plan", "--head", "reference:eagle", "--draft-dtype", "float32")
    assert (refused.code, "a head runs in its target's number format" in refused.err) == (2, True)


def test_drafts_in_another_format(foretoken: Run, pair: SimpleNamespace) -> None:
    def weights(*more: str) -> tuple[int, int]:
        row = json.loads(foretoken("plan", "-t", pair.target, "--draft", pair.draft, *more, "--json").lines[-1])[
            "rows"
        ][0]
        return row["weight_bytes"], row["draft_weight_bytes"]

    def is_half(found: int, full: int) -> bool:
        """Packed matrices have whole blocks of 16 outputs, so that 97 take 112."""
        return full // 2 <= found <= 1.05 * full / 2

    target, draft = weights()
    target_in_16_bits, draft_in_16_bits = weights("--dtype", "bfloat16")
    assert is_half(target_in_16_bits, target)
    assert is_half(draft_in_16_bits, draft)
    assert weights("--draft-dtype", "bfloat16") == (target, draft_in_16_bits)
    assert weights("--dtype", "bfloat16", "--draft-dtype", "float32") == (target_in_16_bits, draft)
    assert weights("--draft-dtype", "int4")[1] < weights("--draft-dtype", "int8")[1] < draft // 2
    assert weights("--weights", "int4")[1] == weights("--draft-dtype", "int4")[1]
    assert weights("--weights", "int4", "--draft-dtype", "float32")[1] == draft


def test_a_quantised_target(foretoken: Run) -> None:
    def weights(*more: str) -> int:
        found = json.loads(foretoken("plan", "-t", "reference:target", "--json", *more).lines[-1])
        assert found["weights"] == (more[-1] if more else "auto")
        return int(found["rows"][0]["weight_bytes"])

    assert weights("--weights", "int4") < weights("--weights", "int8") < weights()


def test_nothing_is_loaded(foretoken: Run, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a checkpoint is ever read."""
    monkeypatch.setattr("foretoken.model.loader.Weights.read", None)
    monkeypatch.setattr("foretoken.model.open.load_decoder", None)
    assert foretoken("plan", "-t", pair.target).code == 0


def test_bad_input(foretoken: Run, pair: SimpleNamespace) -> None:
    cases = [
        (2, ["--memory", "much"], "memory='much': give a size such as 24GiB"),
        (2, ["--memory", "3 parsecs"], "give a size such as"),
        (2, ["--memory", "24"], "memory='24': would be 24 bytes: name the unit, such as 24GiB"),
        (2, ["--reserve", "1"], "reserve=1.0"),
        (2, ["--batch", "0"], "batch=0: must be at least 1"),
        (2, ["--context", "1000"], "takes 1 to 256 tokens"),
        (2, ["--num-draft", "-3"], "num_draft='-3'"),
        (2, ["--draft-dtype", "bfloat16"], "there is no draft"),
        (2, ["--draft", "reference:draft", "--draft-dtype", "int3"], "draft_dtype='int3'"),
        (2, ["--head", "reference:eagle", "--draft-dtype", "int3"], "draft_dtype='int3'"),
        (2, ["--dtype", "int3"], "dtype='int3'"),
        (3, ["--draft", "nowhere"], "nowhere"),
    ]
    for code, arguments, message in cases:
        done = foretoken("plan", "-t", pair.target, *arguments)
        assert (done.code, done.out) == (code, ""), (arguments, done.err)
        assert message in done.err


def test_sizes() -> None:
    sizes = {"7b": 7, "70000": 70_000, "2KiB": 2048, "1.5 MB": 1_500_000, "24gib": 24 * 2**30}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    with pytest.raises(InputError, match="24GiB"):
        parse_bytes("-3GB")


def test_the_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    free = available_bytes(torch.device("cpu"))
    assert 2**20 < free < 2**50
    monkeypatch.setattr(memory, "group_memory", lambda: [GroupMemory(9000, 1000), GroupMemory(5000, 3000)])
    assert available_bytes(torch.device("cpu")) == 2000
    monkeypatch.setattr(memory, "group_memory", list)  # a system without control groups
    assert available_bytes(torch.device("cpu")) > 2**20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert available_bytes(torch.device("cuda")) == 123


@pytest.mark.parametrize(
    ("own_group", "files", "found"),
    [
        ("0::/\n", {"memory.max": "5000", "memory.current": "3000"}, [(5000, 3000)]),  # in a container
        ("0::/\n", {"memory.max": "max", "memory.current": "3000"}, []),
        (
            "0::/a.slice/b.service\n",
            {
                "a.slice/b.service/memory.max": "5000\n",
                "a.slice/b.service/memory.current": "4900\n",
                "a.slice/b.service/memory.stat": "anon 900\nfile 4000\ninactive_file 3900\nactive_file 100\n",
                "a.slice/memory.max": "8000",
                "a.slice/memory.current": "6000",
            },
            [(5000, 1000), (8000, 6000)],
        ),
        (
            "4:cpu,cpuacct:/a\n3:memory:/b\n0::/\n",
            {
                "memory/b/memory.limit_in_bytes": "7000",
                "memory/b/memory.usage_in_bytes": "600",
                "memory/b/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
            },
            [(7000, 400)],
        ),
        (
            "3:memory:/docker/b\n",
            {"memory/memory.limit_in_bytes": "7000", "memory/memory.usage_in_bytes": "600"},
            [(7000, 600)],
        ),
    ],
)
def test_the_limits_of_control_groups_and_what_can_be_dropped_in_them(
    own_group: str, files: dict[str, str], found: list[tuple[int, int]], tmp_path: Path
) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text(own_group)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert group_memory(groups, own) == found


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps of a tenth of a second however many rows, free lookups; few days of few ticks are tried."""
    monkeypatch.setattr(days, "TICK_S", 120.0)
    monkeypatch.setattr(fleet_plan, "_AIMS", (0.1, 0.3))
    one = Curve(((1, 0.1),))
    target = {"name": "t"}
    made = Profile(target, {"cpu": "slow"}, {}, "", "2026-11-21", one, drafters={"ngram": DrafterCost(Curve())})
    return write_profile(made, tmp_path, "p")


def test_a_fleet_with_and_without_speculation(foretoken: Run, profile: Path, tmp_path: Path) -> None:
    """Where drafts cost nothing and all of them stand, four draft tokens answer with a fifth of the replicas."""
    asked = ["plan", "--fleet", profile, "--peak-rate", 20, "--mtbf-h", 0, "--price-per-hour", 3]
    asked += ["--settings", "plain,ngram-4", "--output-tokens", 100]
    found = json.loads(foretoken(*asked, "--acceptance", "1", "--json").lines[-1])
    assert [(row["setting"], row["scaling"], row["meets"]) for row in found["rows"]] == [
        (setting, scaling, True) for setting in ("plain", "ngram-4") for scaling in ("autoscaled", "default", "fixed")
    ]
    plain, drafted = (row for row in found["rows"] if row["scaling"] == "fixed")
    assert 4 < plain["price_per_million_tokens"] / drafted["price_per_million_tokens"] < 6
    assert plain["price_per_million_tokens"] == pytest.approx(plain["replica_hours"] * 3 / plain["num_tokens"] * 1e6)
    bench = tmp_path / "bench.json"
    rows = [{"drafter": "ngram", "slice": "code", "acceptance_per_position": [1.0] * 4}]
    bench.write_text(json.dumps({"rows": rows}))
    named = json.loads(foretoken(*asked, "--bench", bench, "--acceptance", "code", "--json").lines[-1])
    assert named["rows"] == found["rows"]
    assert found["caveats"] == []
    done = foretoken(*asked)
    assert "against plain: ngram-4 -" in done.out
    assert "note: No --acceptance was given: " in done.out
    assert "ngram-4, fixed: day 1" in done.err


def test_a_promise_that_no_fleet_keeps_is_exit_code_1(foretoken: Run, profile: Path) -> None:
    asked = ["plan", "--fleet", profile, "--settings", "plain", "--p95-token-ms", 50, "--max-replicas", 3]
    done = foretoken(*asked, "--min-replicas", 3, "--peak-rate", 0.1)
    assert done.code == 1
    assert "missed" in done.out
    assert "100.0% of the requests are late; raise max_replicas" in done.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--peak-rate", 3], "peak_rate='3.0': needs --fleet PROFILE"),
        (["--fleet", "@", "--memory", "1GiB"], "memory='1GiB': is of memory"),
        (["--fleet", "@", "--acceptance", "code"], "acceptance='code': is no number: a slice needs --bench"),
        (["--fleet", "@", "--settings", "suffix-3"], "settings='suffix-3': the profile has no cost of suffix"),
        (["--fleet", "@", "--min-replicas", 9, "--max-replicas", 8], "must be at least min_replicas, which is 9"),
        (["--fleet", "@", "--routing", "least"], "choose one of two, random"),
        (["--fleet", "@", "--prompt-tokens", "9-3"], "prompt_tokens='9-3': must be a number of tokens"),
    ],
)
def test_what_a_fleet_cannot_be_asked(foretoken: Run, profile: Path, flags: list[object], words: str) -> None:
    done = foretoken("plan", *(profile if flag == "@" else flag for flag in flags))
    assert done.code == 2
    assert words in done.err
