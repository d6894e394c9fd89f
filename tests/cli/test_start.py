"""How the command begins and ends: signals, closed pipes, full disks, the version. Processes are few: torch takes
seconds.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import foretoken as package
from foretoken.cli import exits
from foretoken.cli.app import run
from foretoken.engine.llm import LLM
from tests.cli.conftest import Run
from tests.helpers.faults import expect
from tests.helpers.interrupts import heed_interrupts

ROOT = Path(__file__).resolve().parents[2]


def process(*arguments: str, first: Path | None = None, **options: object) -> subprocess.CompletedProcess[bytes]:
    """`python -m foretoken`, or `python -c`; modules of the folder `first` win."""
    path = os.pathsep.join([*([str(first)] if first else []), str(ROOT)])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path}, check=False, timeout=120, **options
    )  # type: ignore[call-overload,no-any-return]


def test_the_version_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = process("-m", "foretoken", "--version", first=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"foretoken {package.__version__}\n".encode(), b"")


def test_the_version_is_that_of_the_package(foretoken: Run) -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == package.__version__
    done = foretoken("--version", "generate")
    assert (done.code, done.out) == (0, f"foretoken {package.__version__}\n")


def test_c3_ctrl_c_during_the_imports_is_quiet(tmp_path: Path) -> None:
    """A stand-in for torch whose import is interrupted, as a user would."""
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    for arguments in (("-m", "foretoken", "models"), ("-c", "from foretoken.cli import main; main()", "models")):
        done = process(*arguments, first=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_import_of_the_engine_is_quiet(tmp_path: Path, number: signal.Signals) -> None:
    """The verb runs already, and imports what it needs."""
    (tmp_path / "torch.py").write_text(f"import os, time\nos.kill(os.getpid(), {number:d})\ntime.sleep(60)\n")
    done = process("-m", "foretoken", "audit", first=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b"interrupted\n")


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("foretoken.cli.app", signal.SIGTERM, 0),  # before the verb runs
        ("foretoken.cli.serve", signal.SIGTERM, 0),  # in it
        ("foretoken.cli.serve", signal.SIGHUP, 129),
    ],
)
def test_sigterm_ends_a_server_in_order_during_its_imports_too(module: str, number: signal.Signals, code: int) -> None:
    """A supervisor that stops a server at once must not count it as crashed."""
    script = (
        "import os, signal, sys\n"
        f"signal.signal({number:d}, signal.SIG_DFL)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        f"            os.kill(os.getpid(), {number:d})\n"
        "from foretoken.cli import main\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()"
    )
    done = process("-c", script, "serve", "--target", "reference:target", "--port", "0")
    assert (done.returncode, done.stdout) == (code, b""), done.stderr
    assert b"Traceback" not in done.stderr


def test_c3_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    """A shell starts background jobs so."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(7)\n")
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from foretoken.cli import main; main()"
    assert process("-c", code, "models", first=tmp_path).returncode == 7


def test_ctrl_c_reaches_what_tests_start_in_a_background_job() -> None:
    """The other tests of Ctrl-C rest on it: pytest heeds SIGINT again, and so does its child."""
    code, before = "import os, signal; os.kill(os.getpid(), signal.SIGINT)", signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
        heed_interrupts()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert done.returncode == -signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_sighup_reaches_what_tests_start_under_nohup() -> None:
    code, before = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)", signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        heed_interrupts()
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_l3_a_signal_leaves_nothing_behind(tmp_path: Path, name: str, code: int) -> None:
    """The signal comes while `export` writes its folder."""
    script = (
        "import os, signal, foretoken.export.write as write\n"
        f"signal.signal(signal.{name}, signal.SIG_DFL)\n"  # nohup ignores SIGHUP, and children inherit it
        f"write._readable = lambda *_: os.kill(os.getpid(), signal.{name})\n"
        "from foretoken.cli import main; main()"
    )
    out = ("--out", str(tmp_path / "out"))
    arguments = ("export", "--target", "reference:target", "--drafter", "ngram", "--to", "vllm", *out)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (code, b""), done.stderr
    assert done.stderr.endswith(f"stopped by {name}\n".encode())
    assert b"Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_c4_a_closed_pipe_is_quiet() -> None:
    """`foretoken models | head -0`: what a shell reports of any program that its reader left."""
    reader, writer = os.pipe()
    os.close(reader)
    done = process("-m", "foretoken", "models", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (exits.CLOSED_PIPE, b"")


def test_c4_a_full_disk_is_4() -> None:
    with open("/dev/full", "wb") as full:
        done = process("-m", "foretoken", "--version", stdout=full)
    assert (done.returncode, done.stderr) == (4, b"error: cannot write the output: No space left on device\n")


def test_a_closed_standard_output_is_4() -> None:
    """`foretoken ... >&-`: nothing that is printed is lost in silence, and no traceback."""
    done = process("-m", "foretoken", "--version", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (4, b"error: cannot write the output: Bad file descriptor\n")


def test_a_server_needs_no_standard_output() -> None:
    """What it prints when it is ready is no result: it ends with 0."""
    code = "from foretoken.cli import start; start._threads = lambda *_: exit(print('ready')); start.main()"
    done = process("-c", code, "serve", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What is written to standard error would go into it; processes that are started have the stream too."""
    code = f"""
import os, subprocess, sys
from foretoken.cli.exits import open_missing_streams
open_missing_streams()
file = open({str(tmp_path / "file")!r}, "w")
os.write(2, b"lost")
print("lost", file=sys.stderr, flush=True)
subprocess.run(["sh", "-c", "echo lost >&2"], check=True)
print(file.fileno() > 2, sys.stdin)
"""

    def close_two() -> None:
        os.close(0)
        os.close(2)

    done = process("-c", code, preexec_fn=close_two)
    assert (done.returncode, done.stdout, (tmp_path / "file").read_text()) == (0, b"True None\n", "")


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(errno.ENOSPC, 4, "error: cannot write the output: No space left on device\n"), (errno.EPIPE, 141, "")],
)
@pytest.mark.parametrize(
    "arguments",
    [
        ("models",),
        ("models", "--json"),
        ("config", "show"),
        ("generate", "--cost-profile", "off", "-p", "x", "--max-tokens", "2"),
    ],
)
def test_c4_whoever_prints(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    code: int,
    message: str,
    arguments: tuple[str, ...],
) -> None:
    """Tables, JSON, streamed text: each ends the same way where standard output cannot be written."""

    class Broken:
        encoding, errors = "utf-8", "strict"

        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

        def flush(self) -> None:
            raise OSError(number, os.strerror(number))

        def isatty(self) -> bool:
            return False

        def fileno(self) -> int:
            return os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "stdout", Broken())
    found = run(list(arguments))
    err = capsys.readouterr().err
    assert (found, "Traceback" in err) == (code, False)
    assert err.removeprefix("loading smollm2\n") == message


@pytest.mark.filterwarnings("ignore:the observer Trace raised StorageError")
def test_c4_a_full_disk_under_the_trace_is_4(foretoken: Run) -> None:
    """The answer is given, and then what is missing of the trace."""
    expect("a trace that cannot be written")
    done = foretoken("generate", "--prompt", "x", "--max-tokens", 2, "--trace", "/dev/full")
    assert (done.code, "Traceback" in done.err) == (4, False)
    assert "cannot write the trace /dev/full" in done.err


def test_an_error_of_a_file_is_4_and_names_it(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "weights.bin")

    monkeypatch.setattr(LLM, "generate", fails)
    done = foretoken("generate", "--prompt", "x")
    assert done.code == 4
    assert "weights.bin" in done.err


def test_terminated_carries_the_exit_code_of_a_shell() -> None:
    stop = exits.Terminated(signal.SIGTERM)
    assert (stop.exit_code, stop.signal_name) == (143, "SIGTERM")
    assert isinstance(stop, KeyboardInterrupt)  # what Ctrl-C leaves in order, it does


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_what_ctrl_c_leaves_and_says_which_it_was(number: signal.Signals) -> None:
    code = f"""
import os, time
from foretoken.cli import app, start
def run(arguments):
    try:
        os.kill(os.getpid(), {number:d})
        time.sleep(60)
    except KeyboardInterrupt:
        print("what was measured")
    return 130
app.run = run
start.main()
"""
    done = process("-c", code, "doctor")
    said = f"stopped by {number.name}\n".encode()
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"what was measured\n", said)


def test_a_terminal_that_closes_sends_two_signals_and_the_report_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "came", [])
    with pytest.raises(exits.Terminated):
        exits.terminate(signal.SIGHUP, None)
    exits.terminate(signal.SIGHUP, None)  # the shell's
    exits.came[0].at_s -= 10
    with pytest.raises(exits.Terminated):  # nobody waits for ever
        exits.terminate(signal.SIGTERM, None)
