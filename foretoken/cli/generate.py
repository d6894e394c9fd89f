"""`foretoken generate`: one answer, streamed."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from foretoken.cli.common import (
    CacheOption,
    DeviceOption,
    DrafterOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    NumDraftOption,
    RuleOption,
    TargetOption,
    print_json,
    progress,
    spec_config,
)
from foretoken.cli.show import print_shown
from foretoken.config import SamplingParams
from foretoken.core import StepOutput
from foretoken.engine.llm import LLM, GenerateOutput
from foretoken.errors import InputError
from foretoken.model.tokenizer import Detokenizer


def generate(
    target: TargetOption = "reference:target",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, separated by commas (for a folder without a tokenizer).")] = None,
    drafter: DrafterOption = None,
    draft: DraftOption = None,
    num_draft: NumDraftOption = "auto",
    rule: RuleOption = "auto",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token; 1 samples the model's own law.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of tokens that holds this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 = all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this share of the most likely one.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeat the same random choices.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    cache_tokens: CacheOption = None,
    show: Annotated[bool, typer.Option("--show", help="Mark each token by where it came from, with a legend.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, plainly or with a drafter, and say what it cost."""
    ids = _prompt(prompt, prompt_ids)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    spec = spec_config(drafter, draft, num_draft, rule)
    with progress(f"loading {target}"):
        llm = LLM(target, spec=spec, dtype=dtype, device=device, cache_tokens=cache_tokens)
    with llm:
        stream_out = not show and not as_json and llm.tokenizer is not None
        output = llm.generate([ids], params, on_step=_print_pieces if stream_out else None)[0]
        if output.error is not None:
            raise output.error
        _report(llm, output, show, as_json, stream_out)


def _prompt(text: str | None, ids: str | None) -> str | list[int]:
    if (text is None) == (ids is None):
        raise InputError("prompt", text, "give either --prompt TEXT or --prompt-ids 1,2,3")
    if text is not None:
        if not text:
            raise InputError("prompt", text, "is empty; give at least one character")
        return text
    assert ids is not None
    try:
        return [int(part) for part in ids.split(",")]
    except ValueError:
        raise InputError("prompt_ids", ids, "must be whole numbers separated by commas") from None


def _print_pieces(outputs: list[StepOutput]) -> None:
    for output in outputs:
        typer.echo(output.text, nl=False)


def _report(llm: LLM, output: GenerateOutput, show: bool, as_json: bool, streamed: bool) -> None:
    if streamed:
        typer.echo()
    elif llm.tokenizer is None and not as_json:
        typer.echo(",".join(str(token) for token in output.token_ids))
    if show:
        pieces = token_pieces(llm, output)
        print_shown(Console(soft_wrap=True), pieces, output.provenance)
    stats = output.stats
    if as_json:
        print_json(
            {
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "stats": stats.as_dict(),
                "provenance": [[origin.drafter, origin.kind, origin.step] for origin in output.provenance],
            }
        )
        return
    line = f"{stats.num_emitted} tokens in {stats.num_steps} steps, {stats.tokens_per_s:.1f} tokens/s, first token after {stats.ttft_s:.2f} s"
    if stats.num_drafted:
        line += f"; {stats.num_accepted} of {stats.num_drafted} guesses kept ({stats.acceptance_rate:.0%})"
    Console(stderr=True).print(line, style="dim", highlight=False, markup=False)


def token_pieces(llm: LLM, output: GenerateOutput) -> list[str]:
    """The text each token added; bytes of one character appear with the token that completes it."""
    if llm.tokenizer is None:
        return [f"{token} " for token in output.token_ids]
    detokenizer = Detokenizer(llm.tokenizer)
    pieces = [detokenizer.push(token) for token in output.token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces
