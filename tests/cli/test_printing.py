"""How text, tables and answers are printed: exactly where a program reads them, harmlessly and completely where a
person does.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

import foretoken
from foretoken import LLM, SamplingParams
from foretoken.cli import models
from foretoken.engine.request import GenerateOutput
from foretoken.measure.report import markdown
from foretoken.measure.write import write_report
from foretoken.printing import console as pages
from foretoken.printing.console import Console, encodable, shortened, visible, visible_block
from tests.cli.conftest import Run
from tests.helpers import hostile_scenes, hostile_strings
from tests.helpers.hostile_strings import MEGABYTE, STRINGS, Stream, undone

PACKAGE = Path(foretoken.__file__).parent
WHOLE_ANSWER = (
    "generate",
    "--prompt",
    "def f(x):",
    "--max-tokens",
    "12",
    "--cost-profile",
    "off",
    "--dtype",
    "float32",
)


def on(width: int | None, encoding: str = "utf-8") -> tuple[Stream, Console]:
    stream = Stream(encoding, width is not None)
    return stream, Console(file=stream, width=width)


# ---- text


@pytest.mark.parametrize("text", STRINGS.values(), ids=STRINGS)
def test_visible_text_is_one_printable_line_with_everything_in_it(text: str) -> None:
    line, block = visible(text), visible_block(text)
    assert line.isprintable()
    assert undone(line) == undone(text)
    assert undone(block) == undone(text)
    assert [c for c in block if not hostile_strings._harmless(c)] == [c for c in text if c in "\n\t"]
    assert visible(line) == line  # what was escaped is not escaped again
    for encoding in ("ascii", "latin-1", "utf-8"):
        shown = encodable(line, encoding)
        assert shown.encode(encoding).decode(encoding) == shown
        assert undone(shown) == undone(text)


def test_an_error_leaves_out_the_middle() -> None:
    assert shortened("abc", 3) == "abc"
    cut = shortened("a" * 900 + "remedy", 100)
    assert cut.startswith("aaa")
    assert cut.endswith("aremedy")
    assert "(806 characters left out)" in cut
    stream, console = on(None)
    console.message(MEGABYTE, style="red")
    assert len(stream.shown) < 5000


@pytest.mark.parametrize(
    "value",
    [0x1 << 99_999, "x" * 2**20, ["\udce9\x1b"] * 9],
    ids=["a huge integer", "a megabyte", "control characters"],
)
def test_the_value_in_an_error_is_short_and_printable(value: object) -> None:
    message = str(foretoken.InputError("field", value, "remedy"))
    assert message.isprintable()
    assert len(message) < 120


# ---- tables


TABLE = (("setting", "tok/s", "note"), (("plain", "1.5", "first"), ("ngram-5", "12.25", ""), ("漢字", "3", "x[/]\x1b")))


def test_a_table_is_drawn_where_it_fits() -> None:
    stream, console = on(25)
    console.table(*TABLE, title="speeds", justify="lrl")
    assert stream.shown.splitlines() == [
        "speeds",
        "setting  tok/s  note",
        "-------  -----  --------",
        "plain      1.5  first",
        "ngram-5  12.25  ",
        "漢字         3  x[/]\\x1b",
    ]
    assert all(cell_len(line) <= 25 for line in stream.shown.splitlines())


def test_a_table_becomes_records_where_it_does_not() -> None:
    stream, console = on(23)
    console.table(*TABLE)
    assert stream.shown.splitlines() == [
        *(
            "setting: plain",
            "  tok/s: 1.5",
            "  note: first",
            "setting: ngram-5",
            "  tok/s: 12.25",
            "setting: 漢字",
            "  tok/s: 3",
            "  note: x[/]\\x1b",
        ),
    ]


def test_in_a_pipe_the_width_of_a_terminal_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream, console = on(None)
    console.table(("a", "b"), (("x" * 300, "y"),), justify="l")
    assert stream.shown.splitlines()[2] == "x" * 300 + "  y"
    stream, console = on(None)
    console.table(("a", "b"), (("x" * 500, "y"), ("z", "y")))  # padded, every row would be as long
    assert stream.shown.splitlines() == ["a: " + "x" * 500, "  b: y", "a: z", "  b: y"]


def test_models_are_listed_with_their_whole_paths_in_a_pipe(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/home/" + "long/" * 50 + "model"
    row = {"model": path, "family": "llama", "parameters": "", "layers": "", "context": "", "runs_on": "native decoder"}
    row |= {"size": "", "path": ""}
    monkeypatch.setattr(models, "_describe", lambda _name, _path: row)
    monkeypatch.setenv("COLUMNS", "40")
    assert path in foretoken("models").out


@pytest.mark.parametrize("verb", [["generate"], ["bench"], ["bench", "load"], [], ["train", "lm"]], ids=" ".join)
@pytest.mark.parametrize("columns", ["40", "60", "80", "200"])
def test_help_cuts_no_word(foretoken: Run, verb: list[str], columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = foretoken(*verb, "--help").out
    assert "…" not in shown
    assert "--help" in shown


# ---- answers


def test_an_answer_in_a_pipe_is_exact(foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, also what looks like an escape sequence, streamed and not."""
    for scene, names in (("generate", list(STRINGS)), ("generate --n", ["escape sequences", "line ends"])):
        for text in (STRINGS[name] for name in names):
            _, done = hostile_scenes.play(monkeypatch, tmp_path, scene, text, None, "utf-8")
            assert done.out == encodable(text, "utf-8") + "\n"


def test_json_is_ascii_and_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for scene, key in (("generate", "text"), ("config show", "generate.prompt"), ("bench", "command")):
        for text in (STRINGS[name] for name in ("control characters", "surrogates", "formats")):
            if scene == "config show" and text == STRINGS["surrogates"]:
                continue  # refused, see `check`
            _, done = hostile_scenes.play(monkeypatch, tmp_path, scene, text, 80, "ascii", more=("--json",))
            line = done.out.splitlines()[-1]
            assert line.isascii()
            assert line.isprintable()
            told = json.loads(line)[key]
            assert (told["value"] if isinstance(told, dict) else told) == text


def test_w5_show_prints_the_answers_own_text(foretoken: Run) -> None:
    """What a stop string cut off is not shown."""
    whole = foretoken(*WHOLE_ANSWER).out
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    cut = foretoken(*WHOLE_ANSWER, "--stop", stop).out
    assert cut == whole[: whole.index(stop)] + "\n"
    shown = foretoken(*WHOLE_ANSWER, "--stop", stop, "--show").out
    assert shown.startswith(cut + "\nby token, a group per step:")


def test_w5_show_keeps_tabs_and_carriage_returns(
    foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, done = hostile_scenes.play(monkeypatch, tmp_path, "generate --show", "a\tb\rc\x0bd\n\te[/]", None, "utf-8")
    assert done.out.startswith("a\tb\\rc\\x0bd\n\te[/]\n\nby token")


def test_w5_pieces_of_real_answers_are_the_text(text_pair: SimpleNamespace) -> None:
    """Every stop string of one to three characters in a text of strange tokens."""
    from foretoken.cli.answer import answer_pieces, token_pieces

    with LLM(text_pair.target, dtype="float32", cache_tokens=2048) as own:
        params = SamplingParams(max_tokens=40, temperature=2.0, seed=5, ignore_eos=True)
        text = own.generate(["abc"], params)[0].text
        for place in range(0, len(text) - 3, 3):
            output: GenerateOutput = own.generate(
                ["abc"],
                SamplingParams(
                    max_tokens=40, temperature=2.0, seed=5, ignore_eos=True, stop=text[place : place + 1 + place % 3]
                ),
            )[0]
            assert "".join(answer_pieces(token_pieces(own, output), output)) == output.text


# ---- streams


def test_c5_a_real_process_in_another_encoding(tmp_path: Path) -> None:
    """Three more in `proof/`."""
    hostile_strings.check_real_process("ascii", tmp_path)


def test_a_spinner_and_a_bar_take_any_text() -> None:
    for encoding in ("ascii", "utf-8"):
        for text in (*STRINGS.values(), MEGABYTE):
            stream, console = on(40, encoding)
            with console.spinner(text) as spinner:
                spinner.update(text[::-1])
                spinner.say(text)
            with console.bar(text, 2, counts=True) as bar:
                bar.update(text, advance=1)
                bar.update(completed=2)
            assert {character for character in stream.shown if not character.isprintable()} <= {"\n", "\x1b"}
    stream, console = on(None)
    with console.spinner("x[/]") as spinner, console.bar("y", 1) as bar:
        spinner.update("w")
        bar.update("z", advance=1)
        spinner.say("v[/]")
    assert stream.shown == "x[/]\nv[/]\n"


# ---- pages


@pytest.mark.parametrize("text", STRINGS.values(), ids=STRINGS)
def test_a_page_holds_hostile_names(text: str, tmp_path: Path) -> None:
    report = write_report(hostile_scenes.speed_report_of(text), tmp_path, "r")
    page = (tmp_path / "2026-01-02-r.md").read_text(encoding="utf-8")
    assert page == markdown(report, "2026-01-02-r.json")
    assert json.loads((tmp_path / "2026-01-02-r.json").read_text())["command"] == text
    assert all(line.isprintable() for line in page.split("\n"))
    assert undone(page).count(undone(text)) > 5
    columns = {line.replace(r"\|", "").count("|") for line in page.split("\n") if line.startswith("|")}
    assert len(columns) == 2  # the tables of slices, and the summary


def test_a_markdown_table() -> None:
    assert pages.table(("a", "b|c"), [("x", "1")]) == [r"| a | b\|c |", "|---|---:|", "| x | 1 |"]
    assert pages.page(["one", "two\nthree"]) == "one\ntwo\\nthree\n"


# ---- names that no file can have


@pytest.mark.parametrize("name", ["a" * 5000, "/x\0y", "~nobody-of-this-name/x"], ids=["long", "nul", "no home"])
def test_a_name_that_no_file_can_have_is_an_error_like_any_other(foretoken: Run, name: str) -> None:
    Path("profile.json").write_text(json.dumps({"format": "foretoken-profile-1", "rows": [[1, 0.01], [8, 0.02]]}))
    cases = [
        (3, ["models", name]),
        (3, ["generate", "-p", "x", "--target", name]),
        (3, ["generate", "-p", "x", "--target", f"reference:{name}"]),
        (4, ["generate", "-p", "x", "--corpus", name]),
        (4, ["generate", "-p", "x", "--grammar", f"@{name}"]),
        (2, ["generate", "-p", "x", "--drafter", "ngram", "--cost-profile", name]),
        (2, ["simulate", "--profile", "profile.json", "--arrivals", name]),
    ]
    for code, arguments in cases:
        done = foretoken(*arguments)
        assert (done.code, done.out) == (code, ""), done.err[-500:]
        assert len(done.err) < 12_000


# ---- nobody else prints


# Programs of their own that answer in JSON, and what must speak before anything is imported: plain words, no text of
# others.
PROGRAMS = ("text/grammar_trial.py", "text/template_worker.py", "cli/exits.py")


def test_c1_all_printing_goes_through_one_package() -> None:
    """A file that imports rich, or writes to a stream itself, would have to remember every rule of `printing`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("printing/") or name in PROGRAMS:
            continue
        found += [f"{name}:{line}: {what}" for line, what in _prints(ast.parse(path.read_text(encoding="utf-8")))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import rich",
        "import rich.console as r",
        "from rich.text import Text",
        "print('x')",
        "typer.echo('x')",
        "typer.secho('x')",
        "sys.stderr.write('x')",
        "sys.stdout.buffer.write(b'x')",
    ],
)
def test_the_search_for_printing_finds_it(source: str) -> None:
    assert list(_prints(ast.parse(source)))


def _prints(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("print", "typer.echo", "typer.secho", "click.echo") or (
                called.startswith("sys.std") and "write" in called
            ):
                found.append((node.lineno, called))
            continue
        else:
            continue
        found += [(node.lineno, name) for name in names if name.partition(".")[0] in ("rich", "tqdm")]
    return found
