"""`foretoken diagnose`: why acceptance is low, by what the files say and by trying each likely repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.engine.prompts import message_text
from foretoken.errors import InputError
from foretoken.heads.base import HeadBatch
from foretoken.measure.diagnose.endpoint import ask_endpoint
from foretoken.measure.diagnose.options import DiagnoseOptions
from foretoken.measure.diagnose.reading import (
    FileFinding,
    open_draft_or_finding,
    open_head_or_finding,
    read_findings,
    trained_length,
)
from foretoken.measure.diagnose.reference import Accepted, Sampling, Text, measure, read_texts
from foretoken.measure.diagnose.repairs import Asking, Repair, head_repairs, length_repairs, text_repairs
from foretoken.measure.diagnose.report import Diagnosis, Trial, diagnose_report
from foretoken.measure.eval.prompts import EvalPrompt, encoded, in_turns, prompts_of
from foretoken.measure.eval.run import answer_seed
from foretoken.measure.options import ALL
from foretoken.measure.progress import Tell, progress
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
    return run_diagnose(DiagnoseOptions(target, head, **options), command="foretoken.diagnose(...)")


@dataclass(frozen=True)
class _Prompted:
    """What the target answers: how prompts are written, and at which temperature."""

    asking: Asking
    temperature: float


def run_diagnose(options: DiagnoseOptions, command: str = "foretoken diagnose") -> Report:
    """Read, measure, try repairs, and write the result where options ask for it; the caller prints the report.

    Progress goes to standard error.

    Raises:
        InputError, ModelError, UnavailableError: see `diagnose`.
    """
    found = _diagnosis(options, command)
    report = diagnose_report(options, found, command)
    return write_report(report, options.out, options.name)


def _diagnosis(options: DiagnoseOptions, command: str) -> Diagnosis:
    target, drafter = model_folder(options.target), model_folder(options.head or options.draft or "")
    opened = _open(options, drafter, target, "float32")
    if isinstance(opened, FileFinding):
        return Diagnosis(findings=(opened,))
    findings = tuple(read_findings(drafter, target)) if options.head is not None else ()
    prompts = _prompts(options)
    reported = None if options.url is None else ask_endpoint(options, prompts, command)
    sampling = Sampling(options.temperature, options.greedy_drafts)
    as_given = _Prompted(Asking(options.chat), options.temperature)
    with LLM(str(target), SpecConfig(drafter=None), dtype="float32", device="cpu", profile="off") as llm:
        has_template = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
        asking = list(text_repairs(as_given.asking, sampling, has_template))
        wanted = dict.fromkeys([as_given, *(_asked(one, as_given) for one in asking)])
        texts = {one: _answers(llm, options, prompts, one) for one in wanted}
    frozen = FrozenTarget.load(target)
    longest = max(len(prompt) + len(answer) for prompt, answer in texts[as_given])
    trained = trained_length(drafter) if options.head is not None else None
    repairs = [*head_repairs(opened, read_config(target)), *asking, *length_repairs(opened, longest, trained)]
    with progress(len(repairs) + 2) as tell:
        trials, base = _trials(options, opened, frozen, texts, as_given, sampling, repairs, tell)
        tell("half precision")
        half = _half_precision(options, drafter, target, texts[as_given], base, sampling)
    return Diagnosis(findings, base, (*trials, *half), reported)


def _open(options: DiagnoseOptions, drafter: Path, target: Path, dtype: str) -> Student | FileFinding:
    opener = open_draft_or_finding if options.head is None else open_head_or_finding
    return opener(drafter, target, dtype)


def _prompts(options: DiagnoseOptions) -> list[EvalPrompt]:
    """As many prompts as are wanted, from all slices in turns."""
    return in_turns(prompts_of(options.prompts, (ALL,), options.num_prompts))[: options.num_prompts]


def _asked(repair: Repair, as_given: _Prompted) -> _Prompted:
    temperature = as_given.temperature if repair.sampling is None else repair.sampling.temperature
    return _Prompted(repair.asking or as_given.asking, temperature)


def _answers(llm: LLM, options: DiagnoseOptions, prompts: Sequence[EvalPrompt], asked: _Prompted) -> list[Text]:
    """The target's own answers, of at least `_FEWEST_ANSWERED` tokens.

    Raises:
        InputError: hardly any.
    """
    ids = [_ids(llm, prompt, asked.asking) for prompt in prompts]
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


def _trials(
    options: DiagnoseOptions,
    head: Student,
    target: FrozenTarget,
    texts: dict[_Prompted, list[Text]],
    as_given: _Prompted,
    sampling: Sampling,
    repairs: Sequence[Repair],
    tell: Tell,
) -> tuple[list[Trial], Accepted]:
    """Every repair beside the head as it is, and that."""
    heads = [head, *(one.head for one in repairs if one.head is not None)]
    layers = sorted({layer for one in heads for layer in one.hidden_layers()})
    batches: dict[_Prompted, list[HeadBatch]] = {one: read_texts(target, own, layers) for one, own in texts.items()}
    tell("as it is")
    base = measure(head, target, batches[as_given], options.num_draft, sampling)
    found = []
    for repair in repairs:
        tell(repair.changed)
        own = batches[_asked(repair, as_given)]
        how = repair.sampling or sampling
        after = measure(repair.head or head, target, own, options.num_draft, how, repair.length)
        found.append(Trial(repair, base, after, has_same_texts=len(own) == len(batches[as_given])))
    return found, base


@torch.no_grad()
def _half_precision(
    options: DiagnoseOptions, drafter: Path, target: Path, texts: Sequence[Text], base: Accepted, sampling: Sampling
) -> list[Trial]:
    """The same texts in the number format that the engine runs in, if that is not float32."""
    raw = read_raw_config(target)
    dtype = parse_dtype(options.dtype, stored_dtype(raw, Weights(target, WEIGHTS)))
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        return []
    head = _open(options, drafter, target, name)
    assert not isinstance(head, FileFinding)
    served = FrozenTarget(load_decoder(target, dtype=name, device="cpu", pack=False))
    own = measure(head, served, read_texts(served, texts, head.hidden_layers()), options.num_draft, sampling)
    broken = f" ({own.num_broken:,} rows of logits are not finite in {name})" if own.num_broken else ""
    remedy = f"run target and head in bfloat16 or float32, not in {name}: --dtype of the engine{broken}"
    return [Trial(Repair("half precision", f"float32 in place of {name}", remedy), own, base)]
