"""The shape of the package: what a start imports, which names are public, what is registered, which options exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.core import TyperGroup, TyperOption

import foretoken
from foretoken import LLM, EngineConfig, ForetokenError, SamplingParams, SpecConfig
from foretoken.cli.app import app
from foretoken.config import DRAFTERS, LOSSY_RULES, RULES
from foretoken.control.queue import SchedulerConfig
from foretoken.control.routing import RoutingRules
from foretoken.measure.audit.options import AuditOptions
from foretoken.verify import RULES as IMPLEMENTED_RULES
from tests.helpers.specs import spec_of

ROOT = Path(__file__).resolve().parents[1]
_FROM_TYPER = ("--help", "-h", "--install-completion", "--show-completion")
OPTIONS_FILE = ROOT / "tests" / "cli_options.txt"


def test_starting_up_does_not_load_transformers() -> None:
    """It takes seconds, and a native model needs nothing of it."""
    code = (
        "import sys, typer, foretoken.cli.app as cli\n"
        "print(len(list(typer.main.get_command(cli.app).commands.values())) > 10)\n"  # imports every verb
        "print([name for name in ('transformers', 'matplotlib', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "[]"]


def test_public_names() -> None:
    """`__all__` is all there is: what is not listed is a module or private."""
    assert all(
        hasattr(foretoken, name) for name in foretoken.__all__
    )  # some are imported when they are first asked for
    public = {
        name for name, value in vars(foretoken).items() if not name.startswith("_") and type(value).__name__ != "module"
    }
    assert public == set(foretoken.__all__)
    assert list(foretoken.__all__) == sorted(foretoken.__all__, key=lambda name: (name != name.upper(), name))
    errors = {kind.__name__ for kind in subclasses(ForetokenError)} | {"ForetokenError"}
    assert errors <= public  # every error can be caught by name


def subclasses(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("foretoken."):
            yield child
            yield from subclasses(child)


def test_exit_codes() -> None:
    codes = {kind.__name__: kind.exit_code for kind in subclasses(ForetokenError)}
    assert codes == {
        "InputError": 2,
        "ConfigError": 2,
        "ContextLengthError": 2,
        "ModelError": 3,
        "CheckpointError": 3,
        "UnsupportedModelError": 3,
        "MismatchError": 3,
        "CapacityError": 1,
        "OverloadedError": 1,
        "EngineError": 1,
        "WorkerDiedError": 1,
        "RankError": 1,
        "UnavailableError": 1,
        "DraftError": 1,
        "DraftTimeout": 1,
        "NumericsError": 1,
        "StorageError": 4,
        "GateError": 5,
    }


def table_rows(title: str) -> set[str]:
    """First column of the table under a heading of docs/guarantees.md."""
    text = (ROOT / "docs" / "guarantees.md").read_text()
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))


def test_every_rule_is_implemented_and_documented() -> None:
    names = set(RULES) - {"auto"}
    assert set(IMPLEMENTED_RULES) == names == table_rows("Rules")
    for name, rule in IMPLEMENTED_RULES.items():
        assert rule.name == name
        assert rule.lossless == (name not in LOSSY_RULES)


def test_every_drafter_is_implemented_and_documented(mtp_llm: LLM, mtp_pair: SimpleNamespace) -> None:
    assert set(DRAFTERS) == table_rows("Drafters")
    for name in set(DRAFTERS) - {"auto"}:  # is no drafter of its own: a choice among others
        assert mtp_llm._loader.factory.make(spec_of(name, mtp_pair.draft)).name == name


def test_every_drafter_is_on_the_page_that_helps_to_choose() -> None:
    text = (ROOT / "docs" / "drafters.md").read_text()
    assert set(DRAFTERS) <= set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))


def test_every_file_that_the_guarantees_name_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_fields_of_the_public_configs() -> None:
    """Other programs set these by name."""
    assert [field.name for field in dataclasses.fields(SpecConfig)] == [
        *("drafter", "draft", "num_draft", "rule", "allow_lossy", "draft_probability", "min_confidence", "draft_top_k"),
        *("draft_dtype", "draft_vocabulary"),
        *("corpus", "ngram_table"),
        *("exit_layer", "skip_layers"),
        *("parts", "lookahead_window", "lookahead_ngram"),
        *("tree", "branching", "options", "head", "head_kind"),
    ]
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {
        *(
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "stop_token_ids",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "ignore_eos",
            "presence_penalty",
            "frequency_penalty",
        ),
        *(
            "repetition_penalty",
            "logit_bias",
            "bad_words",
            "allowed_token_ids",
            "min_tokens",
            "n",
            "logprobs",
            "logprobs_of",
            "logprob_token_ids",
            "prompt_logprobs",
        ),
        *("json_schema", "regex", "grammar"),
        *("priority", "deadline_s"),
        *("prediction", "tenant", "slice"),
    }
    assert [field.name for field in dataclasses.fields(EngineConfig)] == [
        *("model", "spec", "dtype", "device", "cache_tokens", "cache_dtype"),
        *("max_batch_size", "max_prompt_tokens", "max_step_tokens", "cache_reserve"),
        *(
            "numerics",
            "trace",
            "shadow_rate",
            "routing",
            "profile",
            "adapt",
            "weights",
            "tensor_parallel",
            "chat_template",
        ),
    ]


def options_of(command: object, verb: str = "foretoken") -> Iterator[str]:
    """`verb --option` for every option, `verb ARGUMENT` for every argument."""
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from options_of(child, f"{verb} {name}")
    for parameter in command.params:  # type: ignore[attr-defined]
        names = (
            [*parameter.opts, *parameter.secondary_opts]
            if isinstance(parameter, TyperOption)
            else [str(parameter.name).upper()]
        )
        yield from (f"{verb} {name}" for name in names if name not in _FROM_TYPER)


def test_cli_options_are_those_on_the_list() -> None:
    """A new, renamed or dropped option is a decision: then change tests/cli_options.txt with it."""
    found = sorted(options_of(typer.main.get_command(app)))
    listed = OPTIONS_FILE.read_text().splitlines()
    assert found == listed, f"write the new list to {OPTIONS_FILE.name}:\n" + "\n".join(
        sorted(set(found) ^ set(listed))
    )


@pytest.mark.parametrize(
    "verb",
    [
        "demo",
        "generate",
        "chat",
        "eval",
        "bench speed",
        "bench load",
        "bench profile",
        "bench url",
        "plan",
        "simulate",
        "models list",
        "models inspect",
        "train lm",
    ],
)
def test_every_verb_speaks_json(verb: str) -> None:
    assert f"foretoken {verb} --json" in OPTIONS_FILE.read_text().splitlines()


def test_settings_of_generate_are_the_public_names() -> None:
    """A field of the configs that can be set has a flag of the same name."""
    flags = {
        line.split()[-1].removeprefix("--").replace("-", "_")
        for line in OPTIONS_FILE.read_text().splitlines()
        if " generate " in line
    }
    params = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos"}
    assert params | {"drafter", "draft", "num_draft", "rule", "prediction", "corpus"} <= flags


def test_names_of_models_are_read_in_one_place() -> None:
    found = [str(path.relative_to(ROOT)) for path in trees() if "reference:" in path.read_text(encoding="utf-8")]
    assert found == ["foretoken/model/names.py"]


# ---- nothing is made and never read


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "foretoken").rglob("*.py"))}


def called(node: ast.expr) -> str:
    """The last name of what is called, "" if it has none."""
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def dropped_errors(modules: dict[Path, ast.Module]) -> list[str]:
    """Calls that are statements of their own and make an error: the class of one, or a function that returns one."""
    nodes = [(path, node) for path, module in modules.items() for node in ast.walk(module)]
    functions = {
        node.name: ast.unparse(node.returns)
        for _, node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns
    }
    makers = {name for name, kind in functions.items() if re.search(r"(Error|Exception)\b", kind)}
    statements = [(path, node.lineno, called(node.value)) for path, node in nodes if isinstance(node, ast.Expr)]
    return [
        f"{path}:{line} {name}"
        for path, line, name in statements
        if name in makers or re.search(r"(Error|Exception)$", name)
    ]


def test_w4_no_error_is_made_and_dropped() -> None:
    assert dropped_errors(trees()) == []
    wrong = "def refusal() -> InputError | None: ...\nrefusal()\nself.refusal()\nValueError('x')\nraise ValueError('x')\nfound = refusal()\n"  # noqa: E501
    assert [line.split()[-1] for line in dropped_errors({Path("x"): ast.parse(wrong)})] == [
        "refusal",
        "refusal",
        "ValueError",
    ]


@functools.cache
def names_read() -> frozenset[str]:
    """Attributes that are read, and texts, anywhere but in functions that check options."""
    read: set[str] = set()
    for module in trees().values():
        checks = [
            node
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef) and re.match("__post_init__$|_?check_", node.name)
        ]
        within = {id(node) for check in checks for node in ast.walk(check)}
        nodes = [node for node in ast.walk(module) if id(node) not in within]
        read |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(read)


@pytest.mark.parametrize(
    "kind",
    [SamplingParams, SpecConfig, EngineConfig, SchedulerConfig, RoutingRules, AuditOptions],
    ids=lambda kind: kind.__name__,
)
def test_w4_every_option_is_read_somewhere(kind: type) -> None:
    """As an attribute, or by its name as a text; checking an option and never using it does not count."""
    assert {field.name for field in dataclasses.fields(kind)} - names_read() == set()


# ---- names and sizes

MAX_LINES_OF_A_FILE = 490
MAX_LINES_OF_A_FUNCTION = 70  # below its signature: the options of a verb are not counted


def repeated_classes(modules: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Files by the class name that several classes have."""
    places: dict[str, list[str]] = {}
    for path, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def test_class_names_are_unique() -> None:
    """A name means one thing in the whole package."""
    assert repeated_classes(trees()) == {}
    assert list(repeated_classes({Path("x"): ast.parse("class A: ...\nclass B:\n    class A: ...")})) == ["A"]


def function_lines(modules: dict[Path, ast.Module]) -> dict[str, int]:
    """Lines of every function's body by its place."""
    functions = [
        (path, node)
        for path, module in modules.items()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.body[0].lineno + 1
        for path, node in functions
    }


def test_files_and_functions_are_short() -> None:
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in trees()}
    assert {path: count for path, count in lines.items() if count > MAX_LINES_OF_A_FILE} == {}
    functions = function_lines(trees())
    assert {place: count for place, count in functions.items() if count > MAX_LINES_OF_A_FUNCTION} == {}
    assert function_lines({Path("x"): ast.parse("def f(\n    a,\n):\n    b = a\n    return b\n")}) == {"x:1 f": 2}
