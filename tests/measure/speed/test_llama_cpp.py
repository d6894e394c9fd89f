"""llama.cpp beside us, through recorded output and stand-in programs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.backend import llama_cpp
from foretoken.backend.answering import Drafting, Question
from foretoken.backend.llama_cpp import parse_bench, parse_speculative
from foretoken.backend.llama_programs import LlamaCpp, parsed, run_program
from foretoken.backend.registry import BackendOptions, open_backend
from foretoken.errors import ForetokenError, InputError, StorageError
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.speed.run import run_speed
from studies import exported_head
from studies.serving_load.rivals import speculation
from tests.helpers.gguf_files import write_gguf
from tests.measure.fakes import FakeLLM
from tests.measure.speed.test_other_engines import PLAIN, QUESTION, checkpoints

__all__ = ["checkpoints"]  # fixtures

# Recorded from llama.cpp 0.5.0-dev (commit 0c1e570); `draft:` holds statistics that are not read.
SPECULATIVE = """

def f(x):
    '''Add\\n two'''
    return x + 1



"""
LOG = """Read 30 bytes from binary file /tmp/p.txt
0.00.017.748 I cmn          init: llama threadpool init, n_threads = 2
0.18.882.620 I encoded   17 tokens in    1.212 seconds, speed:   14.029 t/s
0.18.882.640 I decoded   36 tokens in   15.482 seconds, speed:    2.325 t/s
0.18.882.652 I
0.18.882.665 I n_draft   = 3
0.18.882.677 I n_predict = 36
0.18.882.689 I n_drafted = 29
0.18.882.701 I n_accept  = 26
0.18.882.713 I accept    = 89.655%
0.18.882.726 I
0.18.882.737 I draft:
"""
BENCH = """[
  {
    "build_commit": "0c1e570",
    "n_threads": 2,
    "n_prompt": 0,
    "n_gen": 32,
    "n_depth": 20,
    "avg_ns": 67811300,
    "avg_ts": 471.897752,
    "samples_ts": [ 471.898 ]
  }
]"""


def test_recorded_speculative_output():
    answer = parse_speculative(SPECULATIVE, LOG, QUESTION.text)
    assert (answer.num_emitted, answer.num_drafted, answer.num_accepted, answer.num_steps) == (36, 29, 26, 10)
    assert answer.decode_s == 15.482
    assert answer.ttft_s == pytest.approx(1.212 + 1.5482)
    assert answer.text == "    return x + 1"


def test_recorded_bench_output():
    reading = BENCH.replace('"n_gen": 32', '"n_gen": 0').replace("67811300", "2000000")
    answer = parse_bench(BENCH, reading)
    assert (answer.decode_tokens, answer.num_steps) == (32, 32)
    assert answer.e2e_s == pytest.approx(0.0698113)
    assert answer.ttft_s == pytest.approx(0.002 + 0.0678113 / 32)
    assert answer.decode_tokens / answer.decode_s == pytest.approx(471.9, abs=0.1)


@pytest.mark.parametrize("output", ["", "error: unknown argument", "[]", "[{}]", "decoded 3 tokens in 1.0 seconds"])
def test_output_without_a_result_is_an_error(output):
    with pytest.raises(ForetokenError, match="gave no result"):
        parse_bench(BENCH, output)
    with pytest.raises(ForetokenError, match="gave no result"):
        parse_speculative("x", output, "x")


def test_recorded_lookup_and_lookahead_output():
    """The first counted token of llama-lookup came out of the prompt's own pass; llama-lookahead drafts no number and
    prints in colour.
    """
    answer = parse_speculative(SPECULATIVE, LOG, QUESTION.text, emits_first=True)
    assert (answer.num_emitted, answer.decode_tokens, answer.num_steps, answer.decode_steps) == (36, 35, 10, 9)
    assert answer.ttft_s == 1.212
    log = "\n".join(line for line in LOG.splitlines() if "n_drafted" not in line)
    coloured = SPECULATIVE.replace("return", "\033[0;96mreturn\033[0m")
    answer = parse_speculative(coloured, log, QUESTION.text)
    assert answer.num_drafted is None
    assert answer.text == "    return x + 1"


def test_output_without_the_prompts_echo_has_no_text():
    assert parse_speculative(SPECULATIVE, LOG, "another prompt").text == ""


def program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def llama(tmp_path) -> Path:
    """A folder like llama.cpp's, whose programs note how they were called and print recorded results."""
    root = tmp_path / "llama.cpp"
    note = f"open({str(tmp_path / 'calls')!r}, 'a').write(repr(sys.argv[1:]) + '\\n')"
    version = "if '--version' in sys.argv: print('version: 0.5.0-dev (build 1)', file=sys.stderr); raise SystemExit"
    program(root / "build/bin/llama-bench", f"{note}\nprint({BENCH!r})")
    types = "if '--help' in sys.argv: print('--spec-type none,draft-simple,ngram-simple,ngram-map-k,ngram-mod,ngram-cache  list'); raise SystemExit"  # noqa: E501
    program(root / "build/bin/llama-lookup", f"{note}\nprint({SPECULATIVE!r})\nprint({LOG!r}, file=sys.stderr)")
    program(
        root / "build/bin/llama-speculative-simple",
        f"{version}\n{types}\n{note}\nprint({SPECULATIVE!r})\nprint({LOG!r}, file=sys.stderr)",
    )
    (root / "convert_hf_to_gguf.py").write_text(
        f"import sys\nfrom conversion.base import TextModel\n{note}\n"
        "open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write(TextModel().get_vocab_base_pre(None))\n",
        encoding="utf-8",
    )
    (root / "conversion").mkdir()
    (root / "conversion/base.py").write_text(
        "class TextModel:\n    def get_vocab_base_pre(self, tokenizer):\n        raise RuntimeError('unknown BPE')\n",
        encoding="utf-8",
    )
    return root


def test_a_whole_run_with_llama_cpp(llama, checkpoints, tmp_path, monkeypatch):
    target, draft = checkpoints
    monkeypatch.setenv("FORETOKEN_LLAMA_CPP", str(llama))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": QUESTION.text}) + "\n", encoding="utf-8")
    options = SpeedOptions(
        str(target),
        str(draft),
        prompts=prompts,
        num_drafts=(3,),
        max_tokens=4,
        repeats=1,
        warmup=0,
        backends=("local", "transformers", "llama.cpp"),
        peer_num_drafts=(3,),
        peer_lookup_num_drafts=(3, 24),
        threads=1,
    )
    report = run_speed(options, FakeLLM())
    rows = {row.setting: row for row in report.rows if row.temperature == 0.0}
    assert {name for name in rows if name.startswith("llama.cpp")} == {
        "llama.cpp",
        "llama.cpp-ngram-cache",
        *(
            f"llama.cpp-{kind}{n}"
            for kind in ("draft-simple", "ngram-simple", "ngram-map-k", "ngram-mod", "lookup")
            for n in ("", "-3", *(("-24",) if kind != "draft-simple" else ()))
        ),
    }
    assert any("llama.cpp was not measured with ngram-map-k4v, lookahead" in caveat for caveat in report.caveats)
    assert report.results["ratios"]["p"]["best free / llama.cpp best n-gram"] > 0
    assert rows["llama.cpp-draft-simple-3"].acceptance_rate == 26 / 29
    assert report.versions["llama.cpp"].startswith("0.5.0-dev")
    assert "plain / llama.cpp plain" in report.results["ratios"]["p"]
    calls = (tmp_path / "calls").read_text(encoding="utf-8")
    depth = llama_cpp._token_count(target)(QUESTION.text)
    assert f"'-d', '{depth}'" in calls
    assert "'--spec-draft-n-max', '3', '--spec-draft-n-min', '0'" in calls
    assert (
        "'--spec-type', 'ngram-simple', '--spec-ngram-simple-size-n', '4', '--spec-ngram-simple-size-m', '3'" in calls
    )
    assert (
        "'--spec-type', 'ngram-mod', '--spec-ngram-mod-n-match', '16', '--spec-ngram-mod-n-min', '0', "
        "'--spec-ngram-mod-n-max', '3'"
    ) in calls
    assert "'--spec-type', 'ngram-map-k']" in calls  # as the program comes
    assert "'--ignore-eos'" in calls


def test_a_gguf_file_is_given_to_llama_cpp_as_it_is(llama, checkpoints, tmp_path, monkeypatch):
    target, draft = (write_gguf(tmp_path / f"{folder.name}.gguf", folder, tokenizer=True) for folder in checkpoints)
    monkeypatch.setenv("FORETOKEN_LLAMA_CPP", str(llama))
    with pytest.raises(InputError, match="dequantises"):
        open_backend(BackendOptions("transformers", str(target), str(draft)))
    backend = open_backend(BackendOptions("llama.cpp", str(target), str(draft), threads=1))
    for drafting in (PLAIN, *(way for way in backend.draftings((2,)) if way.kind in ("draft-simple", "lookup"))):
        backend.answer(QUESTION, drafting)
    calls = (tmp_path / "calls").read_text(encoding="utf-8")
    assert "--outfile" not in calls
    depth = llama_cpp._token_count(checkpoints[0])(QUESTION.text)
    assert f"'-m', '{target}', '-p', '0', '-n', '12', '-d', '{depth}'" in calls
    assert f"'-m', '{target}', '-p', '{depth}', '-n', '0', '-d', '0'" in calls
    assert f"'-md', '{draft}'" in calls


def test_a_run_whose_log_was_cut_is_repeated(llama, tmp_path):
    """llama.cpp's programs may end before their log is written."""
    body = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n"
    body += f"print(len(open({str(tmp_path / 'runs')!r}).read()))"
    program(llama / "build/bin/llama-flaky", body)

    def parse(least: int):
        def parse(output: str, log: str) -> int:
            if int(output) < least:
                raise ForetokenError("gave no result")
            return int(output)

        return parse

    command = [str(llama / "build/bin/llama-flaky")]
    assert parsed(command, parse(3)) == 3
    with pytest.raises(ForetokenError, match="gave no result"):
        parsed(command, parse(99))
    assert (tmp_path / "runs").read_text() == "x" * 6


def test_arguments_of_the_server_are_those_of_a_spec_type():
    assert speculation("draft-simple", 8)[:4] == ("--spec-type", "draft-simple", "--spec-draft-n-max", "8")
    for kind in ("lookup", "nothing"):
        with pytest.raises(ForetokenError, match=f"kind='{kind}'"):
            speculation(kind, None)


def test_conversion_is_kept_and_made_again_when_the_checkpoint_changes(llama, checkpoints, tmp_path):
    programs, target = LlamaCpp.find(llama), checkpoints[0]
    gguf = programs.convert(target, "f16")
    assert gguf == target.parent / "target-f16.gguf"
    assert gguf.read_text(encoding="utf-8") == "gpt-2"

    def conversions() -> int:
        return (tmp_path / "calls").read_text(encoding="utf-8").count("--outfile")

    programs.convert(target, "f16")
    assert conversions() == 1
    os.utime(gguf, (0, 0))
    programs.convert(target, "f16")
    assert conversions() == 2


def test_an_exported_head_is_converted_with_its_target(llama, checkpoints, tmp_path):
    (tmp_path / "head").mkdir()
    head, more = tmp_path / "head", ("--target-model-dir", str(checkpoints[0]))
    gguf = LlamaCpp.find(llama).converted(head, "f32", tmp_path / "head.gguf", checkpoints[0], *more)
    assert gguf.read_text(encoding="utf-8") == "gpt-2"  # split as the target's tokenizer splits
    assert f"'--target-model-dir', '{checkpoints[0]}'" in (tmp_path / "calls").read_text(encoding="utf-8")


def test_a_trained_head_checks_every_draft_token():
    kind = exported_head.KIND
    assert kind.arguments(None) == ("--spec-type", "draft-eagle3")
    assert kind.arguments(4)[2:] == speculation("draft-simple", 4)[2:]
    assert "--spec-draft-p-min" in kind.arguments(4)


def test_an_unknown_way_to_split_text_is_left_to_the_converter(llama, checkpoints, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = json.loads((checkpoints[0] / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": []}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ForetokenError, match="unknown BPE"):
        LlamaCpp.find(llama).convert(other, "bf16")
    assert not [*tmp_path.glob("*.gguf"), *tmp_path.glob("*.part")]


def test_missing_programs_and_converter_are_named(llama, checkpoints, tmp_path):
    with pytest.raises(StorageError, match="llama-bench"):
        LlamaCpp.find(tmp_path / "nowhere")
    (llama / "convert_hf_to_gguf.py").unlink()
    with pytest.raises(StorageError, match="FORETOKEN_LLAMA_CPP_CONVERT"):
        LlamaCpp.find(llama).convert(checkpoints[0], "q8_0")


def test_the_converter_may_be_named(llama, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    monkeypatch.setenv("FORETOKEN_LLAMA_CPP_CONVERT", str(tmp_path / "mine.py"))
    assert LlamaCpp.find(llama).converter == tmp_path / "mine.py"


def test_a_failing_program_is_an_error_with_its_last_words(llama, checkpoints):
    program(llama / "build/bin/llama-bench", "print('out of memory', file=sys.stderr)\nraise SystemExit(3)")
    with pytest.raises(ForetokenError, match=r"code 3: out of memory"):
        llama_cpp.LlamaRuns(LlamaCpp.find(llama), checkpoints[0], len, 1).plain(QUESTION)


def test_what_the_programs_cannot_be_asked_is_refused_by_name(llama, checkpoints, monkeypatch):
    monkeypatch.delenv("FORETOKEN_LLAMA_CPP", raising=False)
    with pytest.raises(InputError, match="FORETOKEN_LLAMA_CPP must name"):
        open_backend(BackendOptions("llama.cpp", str(checkpoints[0])))
    monkeypatch.setenv("FORETOKEN_LLAMA_CPP", str(llama))
    backend = open_backend(BackendOptions("llama.cpp", str(checkpoints[0])))
    for question, drafting, named in (
        (replace(QUESTION, temperature=0.5), PLAIN, "temperature"),
        (Question(messages=(("user", "x"),)), PLAIN, "messages"),
        (QUESTION, Drafting("draft-simple"), "drafting"),
        (replace(QUESTION, text=""), PLAIN, "text"),
    ):
        with pytest.raises(InputError, match=f"^{named}="):
            backend.answer(question, drafting)


def test_a_program_that_hangs_is_given_up(monkeypatch, llama):
    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired("llama-bench", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ForetokenError, match="timed out"):
        run_program(["llama-bench"])
