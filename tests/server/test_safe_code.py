"""Constructs that made other servers unsafe are not in the package: pickle, evaluated code, code of checkpoints,
templates outside the sandbox, fetching what a client names. See the table in docs/serving/security.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "foretoken"

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_METHODS = {("torch", "load"), ("importlib", "import_module"), ("yaml", "load")}
# Clients of HTTP: the server never fetches an address that a client sends.
FETCHERS = {"urllib.request", "http.client", "requests", "httpx", "httpx2", "aiohttp", "urllib3", "huggingface_hub"}
# Where one of them is needed, with the reason: the modules are named in the package, never by a request.
ALLOWED = {
    ("__init__.py", "importlib.import_module"): "public names that are imported when first used",
    ("backend/registry.py", "importlib.import_module"): "backends that are imported when first used",
    ("cli/verb.py", "importlib.import_module"): "the engine, imported when a verb runs",
    ("cli/verbs.py", "importlib.import_module"): "verbs that are imported when first used",
    ("server/split.py", "httpx2"): "passes requests on to the two addresses of the command line",
    ("registry.py", "importlib.import_module"): "drafters that are imported when first used",
}


def found_in(source: str, is_server: bool) -> Iterator[tuple[int, str]]:
    """Line and name of every banned construct of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name.partition(".")[0] in BANNED_MODULES:
                yield node.lineno, name
            if is_server and any(name == one or name.startswith(f"{one}.") for one in FETCHERS):
                yield node.lineno, name
        if isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[int, str]]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in {*BANNED_CALLS, "Environment"}:
        yield node.lineno, function.id
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        if (owner, function.attr) in BANNED_METHODS or function.attr in ("Environment", "NativeEnvironment"):
            yield node.lineno, f"{owner}.{function.attr}"
    for keyword in node.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg in ("trust_remote_code", "allow_pickle") and is_true:
            yield node.lineno, f"{keyword.arg}=True"


def test_no_banned_construct_is_in_the_package() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), line, name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in found_in(path.read_text(), "server" in path.relative_to(PACKAGE).parts)
    }
    assert {one for one in found if (one[0], one[2]) not in ALLOWED} == set()
    assert set(ALLOWED) == {(path, name) for path, _, name in found}  # no exception outlives its reason


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("eval('1')", "eval"),
        ("exec('1')", "exec"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
        ("load(x, trust_remote_code=True)", "trust_remote_code=True"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle=True"),
        ("import jinja2\njinja2.Environment()", "jinja2.Environment"),
        ("from jinja2 import Environment\nEnvironment()", "Environment"),
        ("import urllib.request", "urllib.request"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("import httpx2", "httpx2"),
    ],
)
def test_the_search_finds_each(source: str, name: str) -> None:
    assert name in {found for _, found in found_in(source, is_server=True)}


def test_what_is_safe_passes() -> None:
    source = (
        "import re\nre.compile('x')\nmodel.eval()\nfrom jinja2.sandbox import ImmutableSandboxedEnvironment\n"
        "ImmutableSandboxedEnvironment()\nload(x, trust_remote_code=False)\nimport json\njson.load(file)\n"
    )
    assert list(found_in(source, is_server=True)) == []
    assert list(found_in("import httpx2", is_server=False)) == []
