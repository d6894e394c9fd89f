"""Strings that a terminal, a markup parser or an encoding acts on, and what may be printed of them."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STRINGS: Mapping[str, str] = {
    "closing markup": "x[/]y",
    "markup": "[bold]table[name][/bold] [link=a]b[/link] [not a tag]",
    "emoji code": "a :smile: b",
    "escape sequences": "a\x1b[31mred\x1b[0m\x1b]0;title\x07b\x9b2J",
    "control characters": "a" + "".join(map(chr, (*range(32), *range(127, 160)))) + "b",
    "line ends": "one\ntwo\r\nthree\rfour\x0bfive\x0csix\x85seven\u2028eight\u2029nine\ttabs\t.",
    "surrogates": "caf\udce9 \ud83d \udfff.",
    "right to left": "a\u202egpj.exe\u202c \u05e9\u05dc\u05d5\u05dd \u0627\u0644 \u2066x\u2069\u200f\u061c.",
    "wide and combining": "漢字とかな 👨\u200d👩\u200d👧 e\u0301 \xa0\xad\u200b\ufeff\U000e0041 ﷽.",
    "table characters": "a|b`c`*d*_e_ <f> & \"g\" 'h' #i",
    "spaces": "a  b   c",
    "formats": "%s %(x)d {0} {x} $HOME \\n \\x1b \\",
    "long": "a" + " ".join(f"word{i}" for i in range(150)) + "b",
}
MEGABYTE = "a" + "0123456789abcde " * 65_536 + "b"
WIDTHS = (40, 80, 200, None)  # None: a pipe
ENCODINGS = ("ascii", "utf-8", "latin-1")

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_ESCAPES = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|([nrt]))")
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}


class Stream(io.TextIOWrapper):
    """Standard output or error as a process has it: strict, in an encoding, on a terminal or not."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", newline="", write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def shown(self) -> str:
        """What was written, without colours and what a spinner or bar does to its own lines."""
        self.flush()
        raw = self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]
        return _STYLES.sub("", re.sub(r"\x1b\[(\?25[lh]|\d*[AK])|\r", "", raw)) if self._terminal else raw


def undone(shown: str) -> str:
    """Escapes turned back into the characters that they stand for."""

    def character(found: re.Match[str]) -> str:
        digits = found.group(1) or found.group(2) or found.group(3)
        return chr(int(digits, 16)) if digits else _NAMED[found.group(4)]

    return _ESCAPES.sub(character, shown)


def count(shown: str, text: str) -> int:
    """How often `text` stands in `shown` whole, escaped or not; escapes in the text itself are no escapes."""
    return max(shown.count(text), undone(shown).count(text))


@dataclass
class Done:
    """One run of the command line."""

    code: int
    out: str
    err: str


@dataclass
class Scene:
    """A command line, and in which streams the string stands as often as given; `exact` is what standard output begins
    with in a pipe.
    """

    arguments: list[str]
    out: int = 0
    err: int = 0
    code: int = 0
    exact: str | None = None
    bounded: bool = False  # whether what stands on standard error may leave out the middle of a long string
    lines: bool = True  # whether all that is printed is lines: no tab, no line end of the string itself


def check(scene: Scene, done: Done, text: str, width: int | None, encoding: str) -> None:
    """No traceback, nothing that acts on a terminal, nothing eaten but the middle of a long error.

    Half a surrogate pair that comes from outside is refused before anything is printed.
    """
    if (
        scene.code not in (2, 4)
        and done.code in (2, 4)
        and any("\ud800" <= character <= "\udfff" for character in text)
    ):
        assert "half of a surrogate pair" in done.err
        assert done.err.replace("\n", "").isprintable()
        return
    assert done.code == scene.code, done.err[:2000]
    assert "Traceback" not in done.out + done.err
    shown = done.out
    assert "CUT OFF" not in shown.replace("'CUT OFF'", "")
    if scene.exact is not None and width is None:
        start = scene.exact.encode(encoding, "backslashreplace").decode(encoding)
        assert shown.startswith(start)
        shown = shown[len(start) :]
    allowed = str.isprintable if scene.lines else _harmless
    kept = "\n" if scene.lines else "\n\t"
    assert [character for character in set(shown) if not allowed(character) and character not in kept] == []
    assert [character for character in set(done.err) if not character.isprintable() and character != "\n"] == []
    assert count(done.out, text) >= scene.out
    if len(text) > 1000 and (scene.bounded or scene.code):
        assert len(done.err) < 20_000
    else:
        assert count(done.err, text) >= scene.err


def _harmless(character: str) -> bool:
    """Whether a terminal prints a character instead of obeying it."""
    return unicodedata.category(character) not in ("Cc", "Cs")


# ---- real processes

_ENVIRONMENTS: Mapping[str, tuple[dict[str, str], str]] = {
    "latin-1": ({"PYTHONIOENCODING": "latin-1"}, "latin-1"),
    "ascii": ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, "ascii"),
    "C": ({"LC_ALL": "C"}, "utf-8"),
    "C.UTF-8": ({"LC_ALL": "C.UTF-8"}, "utf-8"),
}
_THREE_VERBS = r"""
import sys
from foretoken.cli.app import run
codes = run(["config", "show", "--origin"]), run(["generate", "--help"]), run(["models", "/nowhere/\u6f22[/]\x1b"])
sys.exit(str(codes))
"""


def check_real_process(name: str, folder: Path) -> None:
    """A settings file and a path with hostile names, in a process whose streams have the encoding called `name`."""
    (folder / "foretoken.toml").write_text('[generate]\nprompt = "漢字 é [/] \\u001b[31m"\n', encoding="utf-8")
    environment, encoding = _ENVIRONMENTS[name]
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LC_", "LANG", "FORETOKEN_", "PYTHON"))
    }
    own |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2])} | environment
    done = subprocess.run([sys.executable, "-c", _THREE_VERBS], capture_output=True, cwd=folder, env=own, check=False)
    out, err = done.stdout.decode(encoding), done.stderr.decode(encoding)
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "(0, 0, 3)"
    assert (
        " ".join(out.split()).count("漢字 é [/] \\x1b[31m".encode(encoding, "backslashreplace").decode(encoding)) == 2
    )
    assert "/nowhere/漢[/]\\x1b".encode(encoding, "backslashreplace").decode(encoding) in err
    assert "\x1b" not in out + err
