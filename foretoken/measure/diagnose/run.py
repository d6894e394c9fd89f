"""`foretoken diagnose`: why acceptance is low, by what the files say and by trying each likely repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.engine.prompts import message_text
from foretoken.errors import InputError
from foretoken.field_text import from_mapping
from foretoken.heads.base import HeadBatch
from foretoken.machine.identity import versions
from foretoken.measure.diagnose import reading, reference
from foretoken.measure.diagnose.options import DiagnoseOptions
from foretoken.measure.diagnose.reading import ask_endpoint, reported_from
from foretoken.measure.diagnose.reference import Accepted, Sampling, Text, measure
from foretoken.measure.diagnose.repairs import Asking, Repair, head_repairs, length_repairs, text_repairs
from foretoken.measure.diagnose.report import Diagnosis, Trial, diagnose_report
from foretoken.measure.eval.prompts import EvalPrompt, encoded, in_turns, prompts_of
from foretoken.measure.eval.run import answer_seed
from foretoken.measure.kept import KeptFile, kept_run
from foretoken.measure.options import ALL
from foretoken.measure.progress import progress
from foretoken.measure.prompts import check_room
from foretoken.measure.report import Report
from foretoken.measure.write import write_report
from foretoken.model.loader import load_decoder, parse_dtype, read_config, read_raw_config, stored_dtype
from foretoken.model.names import model_folder
from foretoken.model.weights import WEIGHTS, Weights
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.students import Student

_FEWEST_ANSWERED = 2  # tokens of an answer, of which a draft can be told


def diagnose(target: str, head: str | None = None, **options: Any) -> Report:  # noqa: ANN401 - fields of DiagnoseOptions
    """Say why the acceptance rate of a head or draft model is low; `options` are the other fields of `DiagnoseOptions`.

    `results["cause"]` of the report names the cause, None where nothing wrong was found.

    Raises:
        InputError: an option or a prompt that cannot be used; names it.
        ModelError: a model or a head that cannot be read, or does not run in our own decoder.
        UnavailableError: a server that does not answer.
    """
    given = {"target": target, "head": head} | options
    return run_diagnose(from_mapping(DiagnoseOptions, given), command="foretoken.diagnose(...)")


@dataclass(frozen=True)
class _Prompted:
    """What the target answers: how prompts are written, and at which temperature."""

    asking: Asking
    temperature: float


def run_diagnose(options: DiagnoseOptions, command: str = "foretoken diagnose") -> Report:
    """Read, measure, try repairs, and write the result where options ask for it; the caller prints the report.

    Progress goes to standard error. After Ctrl-C the report holds the repairs that were tried until then.

    Raises:
        InputError, ModelError, UnavailableError: see `diagnose`.
        StorageError: see `KeptFile`.
        KeyboardInterrupt: it came before anything was measured.
    """
    prompts = in_turns(prompts_of(options.prompts, (ALL,), options.num_prompts))[: options.num_prompts]
    asked = {"prompts": [one.key for one in prompts]}
    about = {"models": (options.target, options.head, options.draft), "versions": versions()}
    with closing(kept_run(options.resume, "diagnose", asked, options, **about)) as kept:
        found = _diagnosis(options, prompts, command, kept)
    report = diagnose_report(options, found, command)
    return write_report(report, options.out, options.name)


def _diagnosis(options: DiagnoseOptions, prompts: Sequence[EvalPrompt], command: str, kept: KeptFile) -> Diagnosis:
    target, drafter = model_folder(options.target), _drafter(options)
    opened = _open(options, "float32")
    if isinstance(opened, reading.FileFinding):
        return Diagnosis(findings=(opened,))
    findings = tuple(reading.read_findings(drafter, target)) if options.head is not None else ()
    reported = None
    if options.url is not None:
        reported = kept.once("server", reported_from, partial(ask_endpoint, options, prompts, command))
    as_given = _Prompted(Asking(options.chat), options.temperature)
    with LLM(str(target), SpecConfig(drafter=None), dtype="float32", device="cpu", profile="off") as llm:
        has_template = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
        asking = list(text_repairs(as_given.asking, _sampling(options), has_template))
        wanted = dict.fromkeys([as_given, *(_asked(one, as_given) for one in asking)])
        texts = {
            one: kept.once(f"answers to {one}", reference.texts_from, partial(_answers, llm, options, prompts, one))
            for one in wanted
        }
    longest = max(len(prompt) + len(answer) for prompt, answer in texts[as_given])
    trained = reading.trained_length(drafter) if options.head is not None else None
    repairs = [*head_repairs(opened, read_config(target)), *asking, *length_repairs(opened, longest, trained)]
    heads = [opened, *(one.head for one in repairs if one.head is not None)]
    layers = sorted({layer for one in heads for layer in one.hidden_layers()})
    trying = _Trying(options, opened, FrozenTarget.load(target), texts, as_given, layers, kept)
    base, trials, interrupted = _tried(trying, repairs)
    return Diagnosis(findings, base, tuple(trials), reported, interrupted)


def _tried(trying: _Trying, repairs: Sequence[Repair]) -> tuple[Accepted, list[Trial], bool]:
    """What is accepted of the head as it is, and every repair beside it; whether an interrupt ended that early."""
    trials: list[Trial] = []
    with progress(len(repairs) + 2) as tell:
        tell("as it is")
        base = trying.measured(Repair("", "as it is", ""))
        try:
            for repair in repairs:
                tell(repair.changed)
                trials.append(trying.trial(repair, base))
            tell("half precision")
            trials.extend(trying.half_precision(base))
        except KeyboardInterrupt:
            return base, trials, True
    return base, trials, False


def _sampling(options: DiagnoseOptions) -> Sampling:
    return Sampling(options.temperature, options.greedy_drafts)


def _drafter(options: DiagnoseOptions) -> Path:
    return model_folder(options.head or options.draft or "")


def _open(options: DiagnoseOptions, dtype: str) -> Student | reading.FileFinding:
    opener = reading.open_draft_or_finding if options.head is None else reading.open_head_or_finding
    return opener(_drafter(options), model_folder(options.target), dtype)


def _asked(repair: Repair, as_given: _Prompted) -> _Prompted:
    temperature = as_given.temperature if repair.sampling is None else repair.sampling.temperature
    return _Prompted(repair.asking or as_given.asking, temperature)


def _answers(llm: LLM, options: DiagnoseOptions, prompts: Sequence[EvalPrompt], asked: _Prompted) -> list[Text]:
    """The target's own answers, of at least `_FEWEST_ANSWERED` tokens."""
    ids = [_ids(llm, prompt, asked.asking) for prompt in prompts]
    for prompt, own in zip(prompts, ids, strict=True):
        check_room("prompts", prompt.name, len(own), llm.target.max_context_tokens - 1)
    params = [
        SamplingParams(
            max_tokens=options.max_tokens,
            temperature=asked.temperature,
            seed=answer_seed(options.seed, prompt) if asked.temperature > 0 else None,
        )
        for prompt in prompts
    ]
    outputs = llm.generate(ids, params)
    for output in outputs:
        if output.error is not None:
            raise output.error
    found = [(tuple(one.prompt_ids), tuple(one.token_ids)) for one in outputs if len(one.token_ids) >= _FEWEST_ANSWERED]
    if len(found) < 2:
        raise InputError("prompts", len(found), "the target answers them with nothing; give others, or --chat")
    return found


def _ids(llm: LLM, prompt: EvalPrompt, asking: Asking) -> list[int]:
    content = prompt.content
    if not asking.chat and not isinstance(content, str) and not isinstance(content[0], int):
        texts = [message_text(message) or "" for message in content if not isinstance(message, int)]
        ids = llm.encode("\n".join(texts))
    else:
        ids = encoded(llm, prompt, asking.chat)
    if not asking.turn_bos:
        return ids
    bos = llm.tokenizer.bos_token_id if llm.tokenizer is not None else read_config(llm.folder).bos_token_id
    if bos is None or not ids:
        return ids
    return ids[1:] or ids if ids[0] == bos else [bos, *ids]


@dataclass(frozen=True)
class _Trying:
    """A head and the target's answers, along which it and its repairs are measured; `kept` measures each once."""

    options: DiagnoseOptions
    head: Student
    target: FrozenTarget
    texts: Mapping[_Prompted, Sequence[Text]]
    as_given: _Prompted
    layers: Sequence[int]
    kept: KeptFile
    _batches: dict[_Prompted, list[HeadBatch]] = field(default_factory=dict)

    def measured(self, repair: Repair) -> Accepted:
        """What is accepted with a repair."""
        return self.kept.once(
            f"{repair.cause}: {repair.changed}", reference.accepted_from, partial(self._measure, repair)
        )

    def trial(self, repair: Repair, base: Accepted) -> Trial:
        """A repair beside the head as it is."""
        same = len(self.texts[_asked(repair, self.as_given)]) == len(self.texts[self.as_given])
        return Trial(repair, base, self.measured(repair), has_same_texts=same)

    def _measure(self, repair: Repair) -> Accepted:
        asked = _asked(repair, self.as_given)
        if asked not in self._batches:
            self._batches[asked] = reference.read_texts(self.target, self.texts[asked], self.layers)
        own, how = self._batches[asked], repair.sampling or _sampling(self.options)
        return measure(repair.head or self.head, self.target, own, self.options.num_draft, how, repair.length)

    @torch.no_grad()
    def half_precision(self, base: Accepted) -> Iterator[Trial]:
        """The same texts in the number format that the engine runs in, if that is not float32."""
        options, folder = self.options, model_folder(self.options.target)
        dtype = parse_dtype(options.dtype, stored_dtype(read_raw_config(folder), Weights(folder, WEIGHTS)))
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.float32:
            return

        def narrow() -> Accepted:
            head = _open(options, name)
            assert not isinstance(head, reading.FileFinding)
            served = FrozenTarget(load_decoder(folder, dtype=name, device="cpu", pack=False))
            own = reference.read_texts(served, self.texts[self.as_given], head.hidden_layers())
            return measure(head, served, own, options.num_draft, _sampling(options))

        own = self.kept.once(name, reference.accepted_from, narrow)
        broken = f" ({own.num_broken:,} rows of logits are not finite in {name})" if own.num_broken else ""
        remedy = f"run target and head in bfloat16 or float32, not in {name}: --dtype of the engine{broken}"
        yield Trial(Repair("half precision", f"float32 in place of {name}", remedy), own, base)
