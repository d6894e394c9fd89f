"""The command line: answers, marks, JSON, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.cli.answer import legend, marks
from foretoken.core import TokenOrigin
from foretoken.model.names import model_folder
from tests.cli.conftest import Run
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.gguf_files import write_gguf


@pytest.fixture(scope="module")
def expected(pair: SimpleNamespace) -> list[int]:
    with LLM(pair.target, cache_tokens=256) as llm:
        return list(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=12))[0].token_ids)


# ---- generate


def test_token_ids_in_and_out(foretoken: Run, pair: SimpleNamespace, expected: list[int]) -> None:
    """A folder without a tokenizer."""
    mixed = ["--parts", "ngram, draft_model", "--draft", pair.draft]
    for drafting in (
        [],
        mixed,
        ["--drafter", "cascade", "--draft", pair.draft],
        ["--drafter", "ngram"],
        ["--draft", pair.draft, "--num-draft", "3"],
        ["--drafter", "draft_model", "--draft", pair.draft],
    ):
        done = foretoken("generate", "--target", pair.target, "--prompt-ids", "5, 6,7", "--max-tokens", 12, *drafting)
        assert done.code == 0
        assert done.out.strip() == ",".join(map(str, expected))
    assert re.search(
        r"12 tokens in \d+ steps, .* tokens/s, first token after .* s; \d+ of \d+ draft tokens accepted \(\d+%\)",
        done.err,
    )


def test_the_last_line_is_one_json_object(foretoken: Run, pair: SimpleNamespace, expected: list[int]) -> None:
    done = foretoken(
        "generate",
        "-t",
        pair.target,
        "--prompt-ids",
        "5,6,7",
        "--max-tokens",
        12,
        "--draft",
        pair.draft,
        "--num-draft",
        4,
        "--json",
    )
    answer = json.loads(done.lines[-1])
    assert answer["token_ids"] == expected
    assert answer["finish_reason"] in ("length", "stop")
    assert answer["stats"]["num_emitted"] == len(answer["provenance"]) == 12
    assert {
        "num_steps",
        "num_drafted",
        "num_accepted",
        "acceptance_rate",
        "draft_s",
        "verify_s",
        "ttft_s",
        "tokens_per_s",
    } <= set(answer["stats"])
    assert {kind for _, kind, _ in answer["provenance"]} <= {"accepted", "residual", "bonus", "plain"}
    assert {drafter for drafter, kind, _ in answer["provenance"] if kind == "accepted"} <= {"draft_model"}


def test_text_is_streamed_and_equals_the_library(foretoken: Run, text_pair: SimpleNamespace) -> None:
    with LLM(text_pair.target, cache_tokens=256) as llm:
        text = llm.generate(["the list"], SamplingParams(max_tokens=20, ignore_eos=True))[0].text
    common = ["generate", "-t", text_pair.target, "-p", "the list", "--max-tokens", 20, "--ignore-eos"]
    assert foretoken(*common).out == text + "\n"
    assert json.loads(foretoken(*common, "--drafter", "ngram", "--json").lines[-1])["text"] == text
    stop = text[len(text) // 2 :][:2]
    assert foretoken(*common, "--stop", stop, "--stop", "never this").out == text[: text.find(stop)] + "\n"


def test_predictions_and_a_corpus(foretoken: Run, text_pair: SimpleNamespace, tmp_path: Path) -> None:
    """A text or a file that names its drafter by itself; the answer stays, the account tells what the prediction was
    worth.
    """
    common = ["generate", "-t", text_pair.target, "-p", "ab ab", "--max-tokens", 20, "--ignore-eos", "--json"]
    plain = json.loads(foretoken(*common).lines[-1])
    file = tmp_path / "expected.txt"
    file.write_text(plain["text"][:1] + " and on")
    for given in (["--prediction", "wrong"], ["--prediction", f"@{file}"], ["--drafter", "suffix"], ["--corpus", file]):
        answer = json.loads(foretoken(*common, *given).lines[-1])
        assert answer["token_ids"] == plain["token_ids"]
    assert (
        json.loads(foretoken(*common, "--prediction", f"@{file}", "--num-draft", 6).lines[-1])["stats"][
            "rejected_prediction_tokens"
        ]
        > 0
    )
    for arguments, code, message in (
        (["--prediction", "@nowhere"], 4, "prediction: cannot read nowhere"),
        (["--corpus", "nowhere"], 4, "corpus: cannot read nowhere"),
        (["--drafter", "predicted"], 2, "prediction=None: drafter='predicted' needs the text"),
        (["--drafter", "ngram", "--prediction", "x"], 2, "only drafter='predicted' takes it"),
    ):
        done = foretoken(*common, *arguments)
        assert done.code == code
        assert message in done.err


def test_cache_tokens_reach_the_engine(foretoken: Run, pair: SimpleNamespace) -> None:
    common = ["generate", "-t", pair.target, "--prompt-ids", "5", "--ignore-eos", "--cache-tokens", 64, "--max-tokens"]
    assert foretoken(*common, 63).code == 0
    refused = foretoken(*common, 100)
    assert (refused.code, "raise cache_tokens" in refused.err) == (1, True)


def test_sampling_flags_reach_the_engine(foretoken: Run, pair: SimpleNamespace) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.8, top_k=20, min_p=0.01, seed=11)
    with LLM(pair.target, cache_tokens=256) as llm:
        ids = llm.generate([[5, 6]], params, SpecConfig("draft_model", str(pair.draft), num_draft=2, rule="rejection"))[
            0
        ].token_ids
    flags = [
        "--temperature",
        0.9,
        "--top-p",
        0.8,
        "--top-k",
        20,
        "--min-p",
        0.01,
        "--seed",
        11,
        "--draft",
        pair.draft,
        "--num-draft",
        2,
    ]
    done = foretoken(
        "generate", "-t", pair.target, "--prompt-ids", "5,6", "--max-tokens", 10, *flags, "--rule", "rejection"
    )
    assert done.out.strip() == ",".join(map(str, ids))


def test_show_marks_every_token_and_explains_the_marks(foretoken: Run, pair: SimpleNamespace) -> None:
    common = [
        "generate",
        "-t",
        pair.target,
        "--prompt-ids",
        "5,6,7",
        "--max-tokens",
        12,
        "--draft",
        pair.draft,
        "--num-draft",
        3,
    ]
    shown = foretoken(*common, "--show", "--json")
    answer = json.loads(shown.lines[-1])
    groups = next(line for line in shown.lines if line.startswith("by token, a group per step:")).split(": ")[1].split()
    assert "".join(groups) == "".join(
        {"accepted": "+", "residual": "!", "bonus": "*", "plain": "."}[kind] for _, kind, _ in answer["provenance"]
    )
    assert len(groups) == answer["stats"]["num_steps"]
    for mark, kind, meaning in (
        ("+", "accepted", "proposed by the drafter"),
        ("!", "residual", "in place of"),
        ("*", "bonus", "after a fully accepted draft"),
        (".", "plain", "nothing was"),
    ):
        line = next(line for line in shown.lines if line.startswith(f"{mark} {kind}"))
        count = sum(one == kind for _, one, _ in answer["provenance"])
        assert re.search(rf"\b{count} tokens  .*{meaning}", line)
    for place, (drafted, kept) in enumerate(answer["stats"]["accepted_per_position"], start=1):
        line = next(line for line in shown.lines if line.startswith(f"at position {place}"))
        assert line.split()[3:5] == [str(drafted), str(kept)]


def test_marks_and_legend_by_hand() -> None:
    kinds = [
        TokenOrigin(None, "plain", 0),
        TokenOrigin("d", "accepted", 1),
        TokenOrigin("d", "accepted", 1),
        TokenOrigin(None, "bonus", 1),
    ]
    assert marks(kinds) == ". ++*"
    assert marks([]) == ""
    assert re.search(
        r"\+ accepted +2 tokens", "".join(part if isinstance(part, str) else part[0] for part in legend(kinds))
    )


# ---- exit codes


def test_exit_codes_of_bad_input(
    foretoken: Run, pair: SimpleNamespace, text_pair: SimpleNamespace, tmp_path: Path
) -> None:
    """2 usage, 3 model or mismatch, 4 files; one line that names what is wrong; never a traceback."""
    good = ["generate", "-t", pair.target, "--prompt-ids", "1"]
    tiny_checkpoint(tmp_path / "bert", "bert")
    cases = [
        (2, ["generate", "-t", pair.target], "prompt=None: give one of --prompt TEXT, --prompt-ids"),
        (
            2,
            ["generate", "-t", pair.target, "-p", "x", "--prompt-ids", "1"],
            "give one of --prompt TEXT, --prompt-ids",
        ),
        (2, ["generate", "-t", pair.target, "-p", ""], "prompt='': is empty"),
        (2, ["generate", "-t", pair.target, "-p", "x"], "has no tokenizer; give token ids instead of text"),
        (
            2,
            ["generate", "-t", pair.target, "--prompt-ids", "1,b"],
            "prompt_ids='1,b': must be whole numbers separated by commas",
        ),
        (
            2,
            ["generate", "-t", pair.target, "--prompt-ids", "97"],
            "prompt=97: token ids must be whole numbers from 0 to 96",
        ),
        (2, [*good, "--temperature", "nan"], "temperature=nan: must be a finite number"),
        (2, [*good, "--temperature", "hot"], "temperature='hot': must be a finite number"),
        (2, [*good, "--max-tokens", "three"], "max_tokens='three': must be a whole number"),
        (2, [*good, "--drafter", "none", "--num-draft", 3], "num_draft='3': needs a drafter: name a --drafter or"),
        (2, [*good, "--drafter", "ngram", "--num-draft", "x"], "num_draft='x': must be a whole number or auto"),
        (2, [*good, "--drafter", "ngram", "--num-draft", "999"], "num_draft=999: must be smaller than the context"),
        (2, [*good, "--drafter", "oracle"], "drafter='oracle': choose one of"),
        (2, [*good, "--drafter", "draft_model"], "draft=None: drafter='draft_model' needs"),
        (
            2,
            [*good, "--draft", pair.draft, "--draft-dtype", "int2"],
            "draft_dtype='int2': choose one of auto, bfloat16",
        ),
        (
            2,
            [*good, "--drafter", "ngram", "--draft-dtype", "int8"],
            "draft_dtype='int8': only drafter='draft_model', 'eagle', 'medusa', 'block' or 'mtp' takes it",
        ),
        (2, [*good, "--rule", "lucky"], "rule='lucky': choose one of"),
        (2, [*good, "--parts", "ngram,oracle"], "drafter='oracle': choose one of"),
        (2, [*good, "--drafter", "cascade"], "draft=None: part 'draft_model' of drafter='cascade' needs"),
        (
            2,
            [*good, "--drafter", "ngram", "--drafter-option", "width=3"],
            "width='3': unknown option of drafter='ngram'",
        ),
        (2, [*good, "--wrong-flag"], "No such option: --wrong-flag"),
        (2, ["frobnicate"], "No such command 'frobnicate'"),
        (2, ["widen", "--to", "1b"], "no such command: widen; use python -m studies.widen"),
        (2, [*good, "--device", "toaster"], "device='toaster': use auto"),
        (3, ["generate", "-t", tmp_path / "nowhere", "--prompt-ids", "1"], "nowhere"),
        (3, ["generate", "-t", tmp_path / "bert", "--prompt-ids", "1"], "encoder-only"),
        (3, [*good, "--draft", text_pair.draft], "has a vocabulary of 300 tokens, the target one of 97"),
        (3, ["generate", "-t", "reference:nobody", "--prompt-ids", "1"], "is not part of the reference family"),
    ]
    for code, arguments, message in cases:
        done = foretoken(*arguments)
        assert (done.code, done.out) == (code, ""), arguments
        assert message in re.sub(r"\s*\n[│ ]*", " ", done.err), done.err
        assert "Traceback" not in done.err


@pytest.mark.filterwarnings("default:the draft has")
def test_a_warning_is_one_line(foretoken: Run, pair: SimpleNamespace, expected: list[int]) -> None:
    done = foretoken("generate", "-t", pair.target, "--prompt-ids", "5,6,7", "--max-tokens", 12, "--draft", pair.target)
    assert (done.code, done.out.strip()) == (0, ",".join(map(str, expected)))
    assert re.search(r"^warning: the draft has .* drafting costs as much as decoding$", done.err, flags=re.MULTILINE)


def test_a_draft_in_few_bits_gives_the_same_answer_without_a_warning(
    foretoken: Run, pair: SimpleNamespace, expected: list[int]
) -> None:
    good = ["generate", "-t", pair.target, "--prompt-ids", "5,6,7", "--max-tokens", 12, "--draft", pair.target]
    for dtype in ("int8", "int4"):
        done = foretoken(*good, "--draft-dtype", dtype)
        assert (done.code, done.out.strip()) == (0, ",".join(map(str, expected)))
        assert "warning" not in done.err


def test_an_interrupt_is_130(foretoken: Run, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupt)
    done = foretoken("generate", "-t", pair.target, "--prompt-ids", "1")
    assert (done.code, "interrupted" in done.err, "Traceback" in done.err) == (130, True, False)


@pytest.mark.parametrize(
    "verb", [[], ["generate"], ["models"], ["train"], ["train", "lm"], ["config"], ["config", "show"]], ids=" ".join
)
def test_help_is_0_and_says_something(foretoken: Run, verb: list[str]) -> None:
    for flag in ("--help", "-h"):
        done = foretoken(*verb, flag)
        assert done.code == 0
        assert "Usage: foretoken" in done.out


def test_one_real_process(pair: SimpleNamespace, expected: list[int], tmp_path: Path) -> None:
    """Exit code, stdout and stderr as a shell sees them."""
    command = [
        sys.executable,
        "-c",
        "from foretoken.cli import main; main()",
        "generate",
        "-t",
        str(pair.target),
        "--max-tokens",
        "12",
        "--json",
    ]
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), **os.environ}
    done = subprocess.run(
        [*command, "--prompt-ids", "5,6,7"], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["token_ids"] == expected


# ---- models


def test_models_describes_folders(foretoken: Run, pair: SimpleNamespace, tmp_path: Path) -> None:
    for name in ("gpt2", "bert"):
        tiny_checkpoint(tmp_path / name, name)
    done = foretoken("models", pair.target, tmp_path / "gpt2", tmp_path / "bert", "--json")
    native, other, encoder = json.loads(done.lines[-1])["models"]
    assert (done.code, native["family"], native["layers"], native["context"], native["runs_on"]) == (
        0,
        "llama",
        2,
        256,
        "native decoder",
    )
    assert (other["family"], other["runs_on"]) == ("gpt2", "transformers (exact, slower)")
    assert encoder["runs_on"].startswith("not runnable: ")
    assert "encoder-only" in encoder["runs_on"]
    assert "native decoder" in foretoken("models", pair.target).out
    assert foretoken("models", tmp_path / "nowhere").code == 3


def test_models_inspect_says_how_numbers_are_stored(foretoken: Run, pair: SimpleNamespace, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "hf", "qwen2", hidden_size=64, torch_dtype="float32")
    path = write_gguf(tmp_path / "model.gguf", folder, "Q4_0")
    found = json.loads(foretoken("models", "inspect", path, "--json").lines[-1])
    assert (found["family"], found["runs_on"]) == ("qwen2", "native decoder")
    assert [(kind["type"], kind["read"]) for kind in found["types"]] == [
        ("Q4_0", "multiplied by its codes on a CPU, elsewhere dequantised when loaded"),
        ("F32", "as stored"),
    ]
    assert found["bytes"] == sum(kind["bytes"] for kind in found["types"])
    assert found["bytes"] < path.stat().st_size
    out = foretoken("models", "inspect", pair.target).out
    assert "F32" in out
    assert "as stored" in out
    assert "qwen2" in foretoken("models", path).out


def test_models_inspect_shows_experts(foretoken: Run, tmp_path: Path) -> None:
    """They were not shown: a mixture looked like an ordinary decoder."""
    some = tiny_checkpoint(tmp_path / "some", "qwen2_moe", mlp_only_layers=[0])
    note = "native decoder, 6 experts in 2 of 3 layers (3 and a shared one for a token)"
    assert note in foretoken("models", "inspect", some).out
    whole = tiny_checkpoint(tmp_path / "all", "mixtral")
    assert "native decoder, 6 experts (2 for a token)" in foretoken("models", "inspect", whole).out


def test_models_inspect_leaves_out_what_a_refused_checkpoint_does_not_tell(foretoken: Run, tmp_path: Path) -> None:
    """It printed `bert: , , not runnable`: a family and a size that were empty."""
    folder = tiny_checkpoint(tmp_path / "bert", "bert")
    assert f"{folder}: not runnable: model_type='bert' is encoder-only" in foretoken("models", "inspect", folder).out


def test_a_gguf_file_answers(foretoken: Run, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model_folder("reference:target"), "Q8_0", tokenizer=True)
    arguments = ("--prompt", "import os\n", "--max-tokens", 4, "--json")
    done = foretoken("generate", "--target", path, *arguments)
    assert (done.code, len(json.loads(done.lines[-1])["token_ids"])) == (0, 4)
    assert foretoken("plan", "--target", path, "--memory", "4GiB").code == 0
