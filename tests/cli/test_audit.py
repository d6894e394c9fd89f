"""`foretoken audit`: its report, its exit codes, and whole files or none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.cli import audit
from foretoken.errors import StorageError
from foretoken.measure.audit import run as run_module
from foretoken.measure.workload import SLICES, slices
from foretoken.verify.rejection import RejectionRule
from tests.cli.conftest import Run
from tests.helpers.checkpoints import token_ids

SHORT = ["--num-prompts", 4, "--max-tokens", 16, "--dtype", "float32", "--cache-tokens", 2048]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": token_ids(4 + i, seed=i)}) + "\n" for i in range(4)))
    return path


def test_own_prompts_are_of_every_slice() -> None:
    kinds = {prompt.text: prompt.slice for prompt in slices(per_slice=16)}
    found = [kinds[text] for text in audit._own_prompts(16) if isinstance(text, str)]
    assert set(found) == set(SLICES)
    assert len(found) == 16


def test_a_sound_pair(foretoken: Run, pair: SimpleNamespace, prompts: Path) -> None:
    done = foretoken(
        "audit",
        "-t",
        pair.target,
        "--draft",
        pair.draft,
        "--num-draft",
        3,
        "--prompts",
        prompts,
        *SHORT,
        "--out",
        "new/report.md",
    )
    assert done.code == 0, done.err
    assert done.lines[-1].startswith("PASS: ")
    page = Path("new/report.md").read_text()
    assert page.splitlines()[0] == f"# {done.lines[-1]}"
    assert re.search(r"- versions: .*torch \d", page)
    assert "rule coupled" in page
    assert "rule block" in page


def test_json_is_the_last_line_and_a_file(foretoken: Run, pair: SimpleNamespace, prompts: Path) -> None:
    done = foretoken(
        *(
            "audit",
            "-t",
            pair.target,
            "--drafter",
            "ngram",
            "--prompts",
            prompts,
            *SHORT,
            "--temperatures",
            "0.9",
            "--json",
            "--out",
            "report.json",
        )
    )
    found = json.loads(done.lines[-1])
    assert (done.code, len(done.lines), found["passed"]) == (0, 1, True)
    kept = json.loads(Path("report.json").read_text())
    assert kept.pop("page")["title"]
    assert kept == found
    assert found["options"]["spec"]["drafter"] == "ngram"
    assert {"name", "where", "result", "num_tokens", "found", "demanded", "sees", "detail"} == set(found["checks"][0])
    assert found["command"].startswith("foretoken")
    assert "cores" in found["machine"]


def test_a_model_with_a_tokenizer_needs_no_file(foretoken: Run, text_pair: SimpleNamespace) -> None:
    assert foretoken("audit", "-t", text_pair.target, *SHORT, "--temperatures", "0").code == 0
    Path("prompts.txt").write_text("the list\nof a class\n")
    done = foretoken(
        "audit", "-t", text_pair.target, "--draft", text_pair.draft, "--prompts", "prompts.txt", *SHORT, "--json"
    )
    assert (done.code, json.loads(done.lines[-1])["passed"]) == (0, True)


def test_what_fails_is_exit_code_5_and_still_reported(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RejectionRule, "next_token_weights", lambda self, draft, probs, rows: probs[list(rows)])
    common = [
        "audit",
        "-t",
        pair.target,
        "--draft",
        pair.draft,
        "--num-draft",
        3,
        "--rule",
        "rejection",
        "--prompts",
        prompts,
        "--dtype",
        "float32",
    ]
    done = foretoken(
        *common,
        "--temperatures",
        "0.5",
        "--num-prompts",
        48,
        "--max-tokens",
        40,
        "--cache-tokens",
        4096,
        "--json",
        "--out",
        "r.md",
    )
    found = json.loads(done.lines[-1])
    assert (done.code, found["passed"]) == (5, False)
    assert (
        "error: audit failed: distribution: no bias by the draft (temperature 0.5, draft_model, rule rejection)"
        in done.err
    )
    assert Path("r.md").read_text().startswith("# FAIL: 1 of ")


def test_a_lossy_rule(foretoken: Run, pair: SimpleNamespace, prompts: Path) -> None:
    common = ["audit", "-t", pair.target, "--draft", pair.draft, "--rule", "typical", "--prompts", prompts, *SHORT]
    refused = foretoken(*common)
    assert (refused.code, "set allow_lossy=True" in refused.err) == (2, True)
    done = foretoken(*common, "--allow-lossy")
    assert done.code == 0
    assert "lossy rule: distribution not claimed" in done.lines[-1]


def test_bad_input_is_refused_before_anything_is_loaded(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "Session", None)
    cases = [
        (4, ["--out", "ids.jsonl"], "cannot write to ids.jsonl"),
        (2, ["--name", "a/b"], "name='a/b': use letters"),
        (2, ["--temperatures", "warm"], "temperatures='warm': must be numbers separated by commas"),
        (2, ["--temperatures", ""], "temperatures='': name at least one"),
        (2, ["--num-prompts", 0], "num_prompts=0: must be at least 1"),
        (2, ["--drafter", "none", "--num-draft", 3], "needs a drafter"),
        (4, ["--prompts", "nowhere.txt"], "prompts: cannot read nowhere.txt"),
    ]
    for code, arguments, message in cases:
        done = foretoken("audit", "-t", pair.target, *arguments)
        assert (done.code, done.out) == (code, ""), arguments
        assert message in done.err


def test_bad_settings_of_the_engine(foretoken: Run, pair: SimpleNamespace, prompts: Path) -> None:
    cases = [
        (2, [], "has no tokenizer; give a file of JSON lines"),
        (
            2,
            ["--prompts", prompts, "--drafter", "none", "--rule", "greedy"],
            "rule='greedy': nobody drafts: name a drafter, or leave it out",
        ),
        (
            2,
            ["--prompts", prompts, "--drafter", "ngram", "--rule", "greedy"],
            "it would change the distribution at temperature > 0",
        ),
        (2, ["--prompts", prompts, "--numerics", "odd"], "numerics='odd'"),
        (3, ["-t", "nowhere"], "nowhere"),
    ]
    for code, arguments, message in cases:
        done = foretoken("audit", "-t", pair.target, *SHORT, *arguments)
        assert (done.code, done.out) == (code, ""), (arguments, done.err)
        assert message in done.err


def test_an_interrupted_audit_reports_and_goes_on(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was checked is reported; the run that goes on makes the other checks, and finds what a whole run finds."""
    common = ["audit", "-t", pair.target, "--drafter", "ngram", "--prompts", prompts, *SHORT]
    whole = foretoken(*common, "--json")
    assert whole.code == 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "check_numerics", interrupt)
        cut = foretoken(*common, "--resume", "kept.jsonl", "--out", "report.json", "--json")
    assert (cut.code, "Traceback" in cut.err) == (130, False)
    part = json.loads(cut.lines[-1])
    assert (part["interrupted"], part["passed"]) == (True, False)
    assert part["verdict"].startswith("No verdict: the run was interrupted")
    assert part["caveats"] == [
        "The run was interrupted: this is what had been measured by then. Go on with the same options and --resume "
        "kept.jsonl."
    ]
    checks = json.loads(whole.lines[-1])["checks"]
    assert part["checks"] == checks[: len(part["checks"])]
    assert json.loads(Path("report.json").read_text())["checks"] == part["checks"]
    for name in ("check_greedy", "check_distribution", "check_seeds"):
        monkeypatch.setattr(run_module, name, interrupt)  # not called: they are known
    resumed = foretoken(*common, "--resume", "kept.jsonl", "--json")
    assert (resumed.code, json.loads(resumed.lines[-1])["checks"]) == (0, checks)
    other = foretoken(*common, "--resume", "kept.jsonl", "--seed", 1)
    assert (other.code, "was measured with seed=0, this run has 1" in other.err) == (2, True)


def test_a_report_that_cannot_be_written_is_shown(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full after hours of work does not take what was found."""

    def full(*_: object) -> None:
        raise StorageError("out: cannot write r.json: No space left on device")

    monkeypatch.setattr("foretoken.measure.write.replace_text", full)
    common = ["audit", "-t", pair.target, "--prompts", prompts, *SHORT, "--temperatures", 0, "--out", "r.json"]
    for words, shown in (([], "PASS: 3 checks"), (["--json"], '"verdict": "PASS: 3 checks"')):
        done = foretoken(*common, *words)
        assert (done.code, shown in done.lines[-1]) == (4, True)
        assert "error: out: cannot write r.json: No space left on device" in done.err


def test_a_check_finds_the_same_whatever_was_before_it(
    foretoken: Run, pair: SimpleNamespace, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters that learn from answers and cached prefixes would make later checks others than those of a run that
    goes on.
    """
    common = ["audit", "-t", pair.target, "--drafter", "suffix", "--rule", "rejection", "--prompts", prompts, *SHORT]
    whole = foretoken(*common, "--json", "--resume", "kept.jsonl")
    lines = Path("kept.jsonl").read_text().splitlines()
    kept = [line for line in lines if '"distribution' not in line]
    assert len(kept) == len(lines) - 1
    Path("kept.jsonl").write_text("\n".join(kept) + "\n")
    again = foretoken(*common, "--json", "--resume", "kept.jsonl")
    assert json.loads(again.lines[-1])["checks"] == json.loads(whole.lines[-1])["checks"]
