"""`foretoken train answers`: the target answers the user's prompts; heads are trained on what it writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from foretoken.bench.speed_options import SpeedOptions
from foretoken.cli.common import JsonOption, print_json
from foretoken.cli.flags import config_from, takes
from foretoken.engine_config import EngineConfig
from foretoken.files import check_file
from foretoken.printing.console import Console
from foretoken.train.answers import AnswerConfig, read_user_prompts, write_answers


@takes(EngineConfig, fields=("model", "dtype", "device"))
@takes(SpeedOptions, fields=("threads",))
@takes(AnswerConfig)
def answers(
    context: typer.Context,
    target: str,
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with prompt (a text), messages (a conversation) or prompt_ids.")
    ],
    out: Annotated[Path, typer.Option(help="File of the answers; one that is there is continued.")],
    dtype: str = EngineConfig.dtype,
    device: str = EngineConfig.device,
    threads: int | None = None,
    as_json: JsonOption = False,
) -> None:
    """Let the target answer prompts, into a file that heads are trained on; an interrupted run is continued."""
    import torch

    from foretoken.engine.llm import LLM

    config = config_from(AnswerConfig, context.params)
    texts = read_user_prompts(prompts)
    check_file("out", out)
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(stderr=True)
    llm = LLM(target, dtype=dtype, device=device, max_batch_size=config.batch_size)
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
