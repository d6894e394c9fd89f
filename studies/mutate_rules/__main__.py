"""Break the verification rules one formula at a time, and see whether the tests of tests/verify notice.

python -m studies.mutate_rules                      # everything; picks up where an earlier run stopped
python -m studies.mutate_rules --only base          # some files, names separated by commas
python -m studies.mutate_rules --max-minutes 60    # stop after an hour; the next run goes on
python -m studies.mutate_rules --only none          # only write the report from what is known
python -m studies.mutate_rules --fresh              # forget earlier runs

Each mutant is one small change of the syntax tree of a file in foretoken/verify. A forked process imports the package
with that file changed and runs the tests until the first failure. A mutant that fails a test, cannot be imported or
exceeds the time limit is killed; a survivor must be proved equivalent.

Every verdict is on disk when the next mutant begins (build/mutations.jsonl), so a run may be stopped by Ctrl-C or
killed at any time. The report, build/mutations.md, holds the counts, what has not been run, and the survivors; their
proofs are written by hand into studies/mutate_rules/reasons.md, a table of the same columns. docs/mutations.md is
written by hand from both. Exit code 1: a survivor without a proof; 3: something was not run; 130: interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import platform
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from studies.mutate_rules.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "foretoken" / "verify"
REPORT = ROOT / "build" / "mutations.md"
REASONS = Path(__file__).resolve().parent / "reasons.md"
STATE = ROOT / "build" / "mutations.jsonl"
INCOMPLETE, INTERRUPTED = 3, 130
SINGLE_CASES = ["test_shared.py", "test_rules.py", "test_dispatch.py", "test_typical.py"]  # quick, always run whole
MANY_CASES = ["test_enumeration.py", "test_properties.py", "test_coupled.py", "test_efficiency.py"]
# Left to the ordinary run of the tests: a mutant that is wrong in two rounds, or for a fourth token, is wrong in one,
# or for a third.
UNSELECTED = "not two_rounds and not one_round and not wide_law"
FOCUS = {
    "siblings": "tree or traversal",
    "dispatch": "mix",
}  # what can notice a change of this file; a rule's own name, or all
NO_REASON = "NOT EXPLAINED"
_MAX_BYTES = 4 * 2**30


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves one module from changed source."""

    def __init__(self, module: str, code: CodeType) -> None:
        self.module, self.code = module, code

    def find_spec(
        self,
        fullname: str,
        path: object,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


def judge(mutant: Mutant | None, limit_s: int) -> tuple[str, float]:
    """Run the tests against one mutant (None: the package as it is) in a forked process: "survived", "killed" or
    "timeout", and its CPU seconds.

    The limit is one of CPU time, so that a busy machine kills nothing.
    """
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))  # an endless loop may fill the memory first
        _run_tests(mutant)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    verdict = "survived" if code == 0 else "timeout" if code in (-signal.SIGXCPU, -signal.SIGKILL) else "killed"
    return verdict, usage.ru_utime + usage.ru_stime


def _run_tests(mutant: Mutant | None) -> None:
    """In the forked process: swap the file, run, leave with pytest's exit code."""
    code = 70
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for name in [
            name
            for name in sys.modules
            if name == "foretoken.verify" or name.startswith(("foretoken.verify.", "tests."))
        ]:
            del sys.modules[name]
        if mutant is not None:
            module = f"foretoken.verify.{mutant.file.removesuffix('.py')}"
            sys.meta_path.insert(0, _Changed(module, compile(mutant.source, mutant.file, "exec")))
        import hypothesis
        import pytest

        from foretoken.verify import RULES as rules

        # hypothesis is imported by now, before its plugin: pytest warns, and warnings are errors.
        calmly = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        quietly = ["-x", "-q", "-p", "no:cacheprovider", "--noconftest", *calmly]
        # A failing example is enough, the smallest one would take its time; and some examples are enough for a mutant.
        hypothesis.settings.register_profile(
            "first failure", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
        )
        hypothesis.settings.load_profile("first failure")
        _a_little_of_everything()
        from tests.verify import batches

        batches.QUICK = hypothesis.settings(batches.QUICK, max_examples=25)
        stem = mutant.file.removesuffix(".py") if mutant is not None else "base"
        focus = FOCUS.get(stem, stem if stem in rules else "")
        code = int(pytest.main([*quietly, *_paths(SINGLE_CASES)]))
        code = code or int(
            pytest.main([*quietly, "-k", f"({focus}) and {UNSELECTED}" if focus else UNSELECTED, *_paths(MANY_CASES)])
        )
    except BaseException:  # noqa: BLE001 - whatever a mutant does, it counts as noticed
        code = 71
    finally:
        os._exit(code)


def _paths(names: Sequence[str]) -> list[str]:
    return [str(ROOT / "tests" / "verify" / name) for name in names]


def _a_little_of_everything() -> None:
    """One small exact distribution and some decisions for every rule and kind of draft, without pytest: what most
    mutants do not survive.
    """
    from foretoken.verify import RULES
    from tests.helpers.enumeration import (
        RandomTables,
        cases_of,
        check_decisions,
        complete,
        emitted_law,
        joint,
        max_error,
    )
    from tests.verify.drafters import KINDS, TREES, chain_drafter, tree_drafter

    target, distributions = RandomTables(3, seed=34, holes=0.3), RandomTables(3, seed=35, holes=0.3)
    for kind in ("mixed", "dropped", "model", "coin", "point", *TREES, *KINDS):
        cases = cases_of(
            tree_drafter(kind, 2, distributions, 36) if kind in TREES else chain_drafter(kind, 2, distributions, 36),
            {(): 1.0},
        )
        for name, rule in RULES.items():
            if (
                not rule.lossless
                or name == "greedy"
                or (name, kind) == ("coupled", "twice")
                or (kind in TREES and not rule.takes_trees)
            ):
                continue
            if max_error(complete(emitted_law(rule, cases, target), target, 3), joint(target, 3)) > 1e-12:
                os._exit(1)
            if name != "coupled":
                check_decisions(rule, cases[:40], target)


# ---- remembering and reporting


def _test_hash() -> str:
    files = [*sorted((ROOT / "tests" / "verify").glob("*.py")), ROOT / "tests" / "helpers" / "enumeration.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


Known = dict[str, tuple[str, str]]  # verdict and hash of the tests, by mutant


def known_verdicts(state: Path) -> Known:
    """What earlier runs found; a last line that was cut off is removed from the file."""
    if not state.exists():
        return {}
    content = state.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(state, len(whole))
    rows = [json.loads(line) for line in whole.decode().splitlines()]
    return {row["key"]: (row["verdict"], row["tests"]) for row in rows}


def open_mutants(mutants: Sequence[Mutant], known: Known, tests: str) -> list[Mutant]:
    """Those to be judged: unknown ones, and survivors of other tests."""
    return [m for m in mutants if m.key not in known or (known[m.key][0] == "survived" and known[m.key][1] != tests)]


def judge_all(
    todo: Sequence[Mutant],
    judge_one: Callable[[Mutant], tuple[str, float]],
    known: Known,
    tests: str,
    state: Path,
    max_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Judge mutants in turn, each verdict written to `state` at once, with a line of progress; whether all were judged.

    After `max_s` seconds no further one is begun; Ctrl-C ends it too.
    """
    began = clock()
    for done, mutant in enumerate(todo):
        if max_s is not None and clock() - began >= max_s:
            return False
        try:
            verdict, took_s = judge_one(mutant)
        except KeyboardInterrupt:
            return False
        known[mutant.key] = verdict, tests
        row = {"key": mutant.key, "verdict": verdict, "tests": tests, "s": round(took_s, 2), "name": mutant.name}
        with state.open("a") as file:
            file.write(json.dumps(row) + "\n")
        left_s = (clock() - began) / (done + 1) * (len(todo) - done - 1)
        words = f"{done + 1}/{len(todo)} {left_s / 60:.0f} min left  {verdict:8} {took_s:5.1f} s"
        print(f"{words}  {' : '.join(mutant.name)}", flush=True)
    return True


def _reasons() -> dict[tuple[str, ...], str]:
    """The proofs written by hand, by survivor."""
    if not REASONS.exists():
        return {}
    rows = [line.strip().strip("|").split(" | ") for line in REASONS.read_text().splitlines() if line.startswith("| `")]
    return {tuple(cell.strip().strip("`") for cell in row[:4]): row[4].strip() for row in rows if len(row) == 5}


def _report(mutants: Sequence[Mutant], known: dict[str, tuple[str, str]], seconds: float) -> int:
    """Write the report; the number of survivors without a reason."""
    reasons, tests = _reasons(), _test_hash()
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for mutant in mutants:
        verdict, judged_by = known.get(mutant.key, ("not run", tests))
        verdict = verdict if verdict != "survived" or judged_by == tests else "not run"
        counts.setdefault(mutant.file, Counter())[verdict] += 1
        if verdict == "survived":
            survivors.append(mutant)
    total = sum(counts.values(), Counter())
    columns = ("killed", "timeout", "survived", "not run")
    lines = [
        "# Mutations of the verification rules",
        "",
        (
            "One operator, comparison, constant, operand, index or statement of `foretoken/verify` is broken "
            "at a time, and the tests of"
        ),
        (
            "`tests/verify` (exact enumeration and properties; `test_broken_*` not needed) must notice. A "
            "mutant that never ends counts as"
        ),
        "noticed. Every survivor is listed with the reason why it cannot change what a rule does.",
        "",
        (
            f"Date {datetime.datetime.now(datetime.UTC):%Y-%m-%d} · command `python -m studies.mutate_rules` "
            f"· Python {platform.python_version()} · "
            f"{sum(total.values())} mutants, {total['killed'] + total['timeout']} noticed, "
            f"{total['survived']} equivalent, {total['not run']} not run"
        )
        + (f" · {seconds / 60:.0f} min for the last part" if seconds > 60 else ""),
        "",
        "| file | mutants | failed a test | did not end | survived | not run |",
        "|---|---|---|---|---|---|",
        *(
            f"| {file} | {sum(count.values())} | {' | '.join(str(count[column]) for column in columns)} |"
            for file, count in counts.items()
        ),
        "",
        "## Survivors",
        "",
        "| file | function | before | after | why it is equivalent |",
        "|---|---|---|---|---|",
    ]
    unexplained = 0
    for mutant in survivors:
        cells = [cell.replace("|", "¦") for cell in mutant.name]
        reason = reasons.get(tuple(cells), NO_REASON)
        unexplained += reason == NO_REASON
        lines.append(f"| {' | '.join(f'`{cell}`' for cell in cells)} | {reason} |")
    REPORT.write_text("\n".join(lines) + "\n")
    return unexplained


def main() -> int:
    """Make, judge, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of files without .py, comma-separated; none = report only")
    parser.add_argument(
        "--limit-s", type=int, default=0, help="CPU seconds of one mutant (default: 3 times the tests as they are)"
    )
    parser.add_argument("--max-minutes", type=float, help="begin no further mutant after so many minutes")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    import hypothesis  # noqa: F401 - imported once here, shared by every forked process
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch

    import foretoken  # noqa: F401

    torch.set_num_threads(1)
    if options.fresh:
        STATE.unlink(missing_ok=True)
    STATE.parent.mkdir(exist_ok=True)
    mutants = [
        mutant for path in sorted(RULES.glob("*.py")) if path.name != "__init__.py" for mutant in mutants_of(path)
    ]
    chosen = [
        mutant for mutant in mutants if not options.only or mutant.file.removesuffix(".py") in options.only.split(",")
    ]
    known, tests, began = known_verdicts(STATE), _test_hash(), time.monotonic()
    todo, is_complete = open_mutants(chosen, known, tests), True
    if todo:
        verdict, took_s = judge(None, 600)
        if verdict != "survived":
            print("the tests fail on the package as it is", file=sys.stderr)
            return 2
        limit_s = options.limit_s or round(3 * took_s)
        max_s = None if options.max_minutes is None else 60 * options.max_minutes
        is_complete = judge_all(todo, lambda mutant: judge(mutant, limit_s), known, tests, STATE, max_s)
    unexplained = _report(mutants, known, time.monotonic() - began)
    left = len(open_mutants(mutants, known, tests))
    print(f"{REPORT.relative_to(ROOT)} written; {unexplained} survivors without a reason, {left} mutants not run")
    if not is_complete:
        return INCOMPLETE if options.max_minutes is not None else INTERRUPTED
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
