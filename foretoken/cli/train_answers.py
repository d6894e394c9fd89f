"""`foretoken train answers`: the target answers the user's prompts; heads are trained on what it writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.common import DeviceOption, DtypeOption, JsonOption, TargetOption, ThreadsOption, print_json
from foretoken.files import check_file
from foretoken.printing.console import Console
from foretoken.train.answers import AnswerConfig, read_user_prompts, write_answers

_DEFAULT = AnswerConfig()


def answers(
    target: TargetOption,
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with prompt (a text), messages (a conversation) or prompt_ids.")
    ],
    out: Annotated[Path, typer.Option(help="File of the answers; one that is there is continued.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = _DEFAULT.max_tokens,
    temperature: Annotated[float, typer.Option(help="Temperature of use; 0 is greedy.")] = _DEFAULT.temperature,
    top_p: Annotated[float, typer.Option(help="Nucleus of use.")] = _DEFAULT.top_p,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send texts as a user's message, through the target's chat template.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Another number gives other answers.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Answers that run at once.")] = _DEFAULT.batch_size,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the target answer prompts, into a file that heads are trained on; an interrupted run is continued."""
    import torch

    from foretoken.engine.llm import LLM

    config = AnswerConfig(max_tokens, temperature, top_p, seed, batch_size, chat)
    texts = read_user_prompts(prompts)
    check_file("out", out)
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(stderr=True)
    llm = LLM(target, dtype=dtype, device=device, max_batch_size=batch_size)
    try:
        with console.bar("answering", len(texts), counts=True) as bar:

            def tell(done: int) -> None:
                bar.update(completed=done)
                if not console.is_terminal:
                    console.line(f"answering: {done} of {len(texts)}")

            count = write_answers(llm, texts, out, config, tell)
    finally:
        llm.close()
    if as_json:
        print_json(dataclasses.asdict(count) | {"answers": str(out)})
    else:
        Console().line(f"{out}: {count.num_answers:,} answers, {count.num_tokens:,} tokens")
