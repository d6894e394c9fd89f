"""Every verb of the command line printing a given string: a scene for each verb and kind of place.

A scene prepares what a verb meets (a model's answer, a settings file, what a measurement found) so that the string
comes out of it, and says what stands where. Nothing here loads a model.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.cli import answer, audit, demo, models, origins
from foretoken.cli.app import run
from foretoken.cli.demo_run import DemoAnswer, DemoPrompt
from foretoken.config import PLAIN, SpecConfig
from foretoken.core import StepOutput, TokenLogprobs, TokenOrigin
from foretoken.engine.request import GenerateOutput
from foretoken.engine.stats import RequestStats
from foretoken.errors import EngineError
from foretoken.measure.audit.options import AuditOptions
from foretoken.measure.audit.run import audit_report
from foretoken.measure.checks import Check
from foretoken.measure.eval.counts import AnswerCounts
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.measure.eval.result import EvalSample
from foretoken.measure.eval.run import EvalRun
from foretoken.measure.report import Report, Table
from foretoken.measure.speed.report import speed_report
from foretoken.measure.speed.rows import SpeedRow
from foretoken.model.names import model_folder
from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.train.recipes import Result
from tests.helpers.hostile_strings import Done, Scene, Stream
from tests.measure.fakes import rows as bench_rows


def play(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    name: str,
    text: str,
    width: int | None,
    encoding: str,
    more: tuple[str, ...] = (),
) -> tuple[Scene, Done]:
    """Run scene `name` with `text` on streams of that width and encoding."""
    with monkeypatch.context() as patched, warnings.catch_warnings():
        patched.chdir(folder)
        patched.setenv("TERM", "xterm-256color")
        patched.setenv("COLUMNS", str(width or 80))
        patched.setattr(sys, "argv", ["foretoken", text])
        scene = SCENES[name](patched, folder, text)
        out, err = (Stream(encoding, width is not None) for _ in range(2))
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        code = run([*scene.arguments, *more])
        return scene, Done(code, out.shown, err.shown)


# ---- what the verbs meet


def _stats(text: str) -> RequestStats:
    stats = RequestStats(rule=text, lossy=True, num_steps=2, num_emitted=3, num_drafted=4, num_accepted=1, total_s=1.0)
    stats.drafted_by, stats.accepted_by = {text: 3, "other": 1}, {text: 1}
    stats.drafted_at, stats.accepted_at = [4], [1]
    return stats


def _pieces(text: str) -> list[str]:
    """Three tokens, the last one partly behind the end of the answer."""
    return [text[: len(text) // 2], text[len(text) // 2 :], "CUT OFF"]


def _output(text: str, logprobs: bool) -> GenerateOutput:
    origins = (TokenOrigin(None, "plain", 0), TokenOrigin(text, "accepted", 1), TokenOrigin(None, "bonus", 1))
    entries = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in (1, 2, 3)) if logprobs else None
    return GenerateOutput((1,), text, (1, 2, 3), "stop", _stats(text), origins, entries)


class _Answering:
    """An LLM that answers with the string and the beginning of a token that a stop string cut off."""

    text = ""
    raises: Exception | None = None
    warns = False
    tokenizer = object()

    trace_error = None

    def __init__(self, *_: object, **__: object) -> None:
        self.stats = SimpleNamespace(profile_s=1.0)
        self.costs = SimpleNamespace(path=self.text)

    def __enter__(self) -> _Answering:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(
        self, _prompts: object, params: Any, on_step: Callable[[list[StepOutput]], None] | None = None
    ) -> list[GenerateOutput]:
        if self.raises is not None:
            raise self.raises
        if self.warns:
            warnings.warn(self.text, stacklevel=2)
        if on_step is not None:
            first, *others = _pieces(self.text)[:2]
            for piece, reason in ((first, None), ("".join(others), "stop")):
                on_step([StepOutput(0, (1,), piece, (), reason)])
        return [_output(self.text, params.logprobs is not None)]


def _answers(patched: pytest.MonkeyPatch, text: str, **values: object) -> list[str]:
    patched.setattr("foretoken.engine.llm.LLM", type("Answering", (_Answering,), {"text": text, **values}))
    patched.setattr(answer, "token_pieces", lambda _llm, _output: _pieces(text))
    return ["generate", "--prompt", "x"]


def _profile(text: str) -> Profile:
    one = Curve(((1, 1.0),))
    costs = {"ngram": DrafterCost(Curve()), text: DrafterCost(one, batch=one, prompt=one)}
    target = {"name": text, "max_context_tokens": 100, "block_tokens": 32}
    return Profile(
        target, {"cpu": text}, {"torch": text}, text, text, one, batch=one, chunk=one, drafters=costs, caveats=(text,)
    )


def bench_rows_of(text: str) -> tuple[SpeedRow, ...]:
    return tuple(
        replace(
            row,
            slice=row.slice if row.slice == "all" else text + row.slice,
            setting=row.setting if row.setting == "plain" else text,
        )
        for row in bench_rows(**{"ngram-3": 0.5})
    )


def speed_report_of(text: str) -> Report:
    about = {"machine": {"cpu": text}, "versions": {"torch": text}, "date": "2026-01-02T03:04:05", "files": (text,)}
    return speed_report(bench_rows_of(text), {"target": text}, text, [text], **about)


def _load_report(text: str) -> Report:
    return Report(
        title=text,
        command=text,
        options={"target": text},
        results={"kind": text, "rows": (), "summary": {text: text}},
        tables=(Table(text, (text, text), ((text, text),), (text,)),),
        explained=text,
        caveats=(text,),
        conclusions=(text,),
        machine={"cpu": text},
        versions={},
        files=(text,),
    )


def _audit(text: str) -> Report:
    check = Check(text, text, "pass", 3, text, text, text, detail=text)
    options = AuditOptions(text, SpecConfig())
    return audit_report(options, (check,), text, machine={"cpu": text}, versions={"torch": text}, date="2026-01-02")


# ---- scenes


def _streamed(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene(_answers(patched, text), out=1, err=1, exact=text + "\n", lines=False)


def _several(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene([*_answers(patched, text), "--n", "2"], out=1, err=1, exact=text + "\n", lines=False)


def _shown(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene(
        [*_answers(patched, text), "--show"], out=2, err=2, lines=False
    )  # the answer, the drafter's name; the rule, where costs are kept


def _logprobs(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene([*_answers(patched, text), "--logprobs", "1"], out=1, err=1, exact=text + "\n", lines=False)


def _warned(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene([*_answers(patched, text, warns=True), "--json"], err=1, bounded=True)


def _failed(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene(_answers(patched, text, raises=EngineError(text)), err=1, code=1)


def _demo(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    plain = DemoAnswer(DemoPrompt(text, text, text), PLAIN, text, (1, 2, 3), 1.0, 3, 0, 0)
    answers = [plain, replace(plain, setting="auto", seconds=0.5, num_drafted=2, num_accepted=1)]
    patched.setattr("foretoken.engine.llm.LLM", type("Answering", (_Answering,), {"text": text, "tokenizer": text}))
    patched.setattr("foretoken.cli.demo.DemoRun", lambda *_: SimpleNamespace(warm_up=lambda: None))
    patched.setattr(demo, "_streamed_answers", lambda *_: answers)
    patched.setattr(demo, "_other_answers", lambda *_: [])
    return Scene(["demo", "--target", text], out=2, lines=False)  # the kind in the table and in a sentence


def _models(patched: pytest.MonkeyPatch, folder: Path, text: str) -> Scene:
    row = {"model": text, "family": text, "parameters": "", "layers": "", "context": "", "runs_on": text}
    row |= {"size": "", "path": ""}
    patched.setattr(models, "PACKAGED", {})
    patched.setattr(models, "_cached", lambda: [(text, folder)])
    patched.setattr(models, "_describe", lambda _name, _path: row)
    patched.setattr(models, "_own_names", list)
    return Scene(["models"], out=3)


def _no_model(_patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene(["models", f"/nowhere/{text}"], err=1, code=3)


def _plan(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    found = model_folder("reference:draft")
    for module in ("heads.footprint", "model.names"):  # the first imports from the second, and keeps what it finds
        patched.setattr(f"foretoken.{module}.model_folder", lambda _name: found)
    return Scene(["plan", "--target", text, "--draft", text, "--memory", "1MB"], out=2, err=1, code=1)


def _evaluated(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    """Drafter and slice in two tables, the rule; the slice again in a note about its number of prompts."""
    counts = AnswerCounts(2, 1, 2, 1, 3, [1, 1], [1, 0])
    samples = [EvalSample(text, text, 0.0, "p", text, counts)]
    patched.setattr("foretoken.measure.eval.prompts.own_prompts", lambda _names, _count: [EvalPrompt("n", text, "x")])
    patched.setattr(EvalRun, "run", lambda run, _tell: run.samples.extend(samples))
    return Scene(["eval"], out=6)


def _bench(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    patched.setattr("foretoken.measure.speed.run.run_speed", lambda _options, command: speed_report_of(text))
    return Scene(["bench"], out=6)


def _load(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    patched.setattr("foretoken.measure.load.run.run_batches", lambda _options, _command: _load_report(text))
    return Scene(["bench", "load", "--batches", "1"], out=8)


def _profiled(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    def measured(_options: object, command: str, tell: Callable[[str, float], None]) -> Profile:
        tell(text, 0.5)
        return _profile(text)

    patched.setattr("foretoken.measure.speed.profile.run_profile", measured)
    return Scene(["bench", "profile"], out=4)


def _slices(_patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene(["bench", "--temperatures", text + "x"], err=0, code=2)


def _audited(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    def ran(*_: object, tell: Callable[[str], None]) -> Report:
        tell(text)
        return _audit(text)

    patched.setattr("foretoken.measure.audit.run.run_audit", ran)
    patched.setattr(audit, "_own_prompts", lambda _count: [])
    return Scene(["audit"], out=6)


def _simulated(_patched: pytest.MonkeyPatch, folder: Path, text: str) -> Scene:
    (folder / "profile.json").write_text(json.dumps(_profile(text).as_dict()), encoding="utf-8")
    common = [
        "simulate",
        "--profile",
        "profile.json",
        "--arrivals",
        "poisson:1",
        "--requests",
        "2",
        "--prompt-tokens",
        "4",
        "--output-tokens",
        "4",
    ]
    return Scene([*common, "--settings", "plain,ngram-2"], out=3)  # date, machine, caveat


def _settings(patched: pytest.MonkeyPatch, text: str) -> None:
    patched.setattr(origins, "_read_file", lambda: {"generate": {"prompt": text, "stop": [text], "target": text}})
    patched.setattr(origins, "_path", lambda: text)


def _config(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    _settings(patched, text)
    return Scene(
        ["config", "show", "--origin"], out=5
    )  # two values and three origins; the list is written as Python does


def _unknown_setting(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    patched.setattr(origins, "_read_file", lambda: {"generate": {text: text}})
    return Scene(["config", "show"], err=1, code=2)


def _help(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    _settings(patched, text)
    return Scene(["generate", "--help"])


def _no_option(_patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    return Scene(["generate", f"--{text.replace('=', '')}"], code=2)


def _trained(patched: pytest.MonkeyPatch, _folder: Path, text: str) -> Scene:
    patched.setattr("foretoken.train.recipes.train_lm", lambda *_: (Result(1, 2, 3.0, 4.0, 5.0), text))
    return Scene(["train", "lm", "--out", "x"], out=1)


SCENES: Mapping[str, Callable[[pytest.MonkeyPatch, Path, str], Scene]] = {
    "generate": _streamed,
    "generate --n": _several,
    "generate --show": _shown,
    "generate --logprobs": _logprobs,
    "a warning": _warned,
    "an error": _failed,
    "demo": _demo,
    "models": _models,
    "models, not there": _no_model,
    "plan": _plan,
    "eval": _evaluated,
    "bench": _bench,
    "bench load": _load,
    "bench profile": _profiled,
    "bench, wrong": _slices,
    "audit": _audited,
    "simulate": _simulated,
    "config show": _config,
    "config show, wrong": _unknown_setting,
    "help": _help,
    "no such option": _no_option,
    "train": _trained,
}
