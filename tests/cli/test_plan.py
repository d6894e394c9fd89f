"""`foretoken plan`: what fits, which draft, and exit code 1 with what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken.errors import InputError
from foretoken.machine import memory
from foretoken.machine.memory import available_bytes, parse_bytes
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
    assert [parse_bytes(text) for text in ("7", "2KiB", "1.5 MB", "24gib")] == [7, 2048, 1_500_000, 24 * 2**30]
    with pytest.raises(InputError, match="24GiB"):
        parse_bytes("-3GB")


def test_the_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    free = available_bytes(torch.device("cpu"))
    assert 2**20 < free < 2**50
    limits = {"memory.max": 5000, "memory.current": 3000}
    monkeypatch.setattr(memory, "_control_group", limits.get)
    assert available_bytes(torch.device("cpu")) == 2000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert available_bytes(torch.device("cuda")) == 123
