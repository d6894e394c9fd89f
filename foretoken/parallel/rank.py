"""The process of a rank other than 0: `python -m foretoken.parallel.rank`, started by `group`.

It reads its `RankSetup` from standard input, loads its part of the weights, says so on standard output, and computes
plan after plan. It has no requests, drafts or random numbers, and decides nothing. It ends when standard input is
closed: no rank outlives rank 0. SIGINT and SIGTERM, which a terminal and a service manager send to all processes of a
group, are rank 0's matter and ignored here.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

from foretoken.errors import CheckpointError
from foretoken.machine.process import keep_freed_memory
from foretoken.model.decoder import Decoder
from foretoken.model.gguf.header import is_gguf
from foretoken.model.gguf.parts import part_files
from foretoken.model.loader import load_decoder
from foretoken.model.open import kept_dtype
from foretoken.model.paged import PagedModel
from foretoken.model.strict import strict_kind
from foretoken.parallel.exchange import PATIENT_S, LostRankError, RankExchange
from foretoken.parallel.group import LOADED, RankSetup
from foretoken.parallel.plan import Plan, PlanKind


class Rank:
    """Computes this rank's part of every plan."""

    def __init__(self, setup: RankSetup) -> None:
        self.setup, self.device = setup, torch.device(setup.device)
        self.exchange = RankExchange(setup.rank, setup.world, self.device)
        self.decoder = load_rank(setup, self.exchange)

    def serve(self) -> None:
        """Compute plans until the process is ended."""
        self.exchange.connect(Path(self.setup.folder), PATIENT_S)
        first, _ = self.exchange.listen(0, torch.float32)
        assert first.kind is PlanKind.CACHE
        kind = strict_kind(self.decoder) if self.setup.numerics == "strict" else PagedModel
        model = kind(self.decoder, first.numbers[0], kept=kept_dtype(self.decoder, self.setup.cache_dtype))
        weight = self.decoder.norm.weight
        while True:
            self.compute(model, *self.exchange.listen(weight.shape[-1], weight.dtype))

    @torch.inference_mode()
    def compute(self, model: PagedModel, plan: Plan, rows: torch.Tensor) -> None:
        """What rank 0 computes at this moment; it alone keeps the results."""
        for move in plan.moves:
            model.move(*move)
        if plan.kind is PlanKind.EMBED:
            model.embed(torch.tensor(plan.tokens, dtype=torch.int64, device=self.device))
        elif plan.kind is PlanKind.OUTPUT:
            model.output_logits(rows)
        else:
            for table in self.decoder.rotaries:
                table.cover(max(plan.positions, default=-1) + 1)
            one = plan.pass_of(model.block_size, self.device, rows)
            if plan.kind is PlanKind.EARLY:
                model.run_early(one)
            else:
                model.run_pass(one)


def load_rank(setup: RankSetup, exchange: RankExchange) -> Decoder:
    """The part of the weights that a rank holds.

    Raises:
        CheckpointError: the files are others than when the model was opened: ranks start one after the other, and parts
            of two versions would be computed with as one model.
    """
    quant = None if setup.weights == "auto" else setup.weights
    folder, place = Path(setup.model), torch.device(setup.device)
    decoder = load_decoder(
        *(folder, setup.dtype, place), quant=quant, rank=setup.rank, world=setup.world, collective=exchange
    )
    if files_of(folder) != setup.files:
        raise CheckpointError(
            f"{folder} was replaced or written to while the ranks read it: open it again when its files are complete"
        )
    return decoder


def files_of(model: Path) -> str:
    """What tells the files of a checkpoint from others that are put in their place: name, size, time, number."""
    files = part_files(model) if is_gguf(model) else sorted((*model.glob("*.safetensors*"), model / "config.json"))
    return ", ".join(map(_about, files))


def _about(path: Path) -> str:
    try:
        about = path.stat()
    except OSError:
        return f"{path.name} is missing"
    return f"{path.name} {about.st_size} {about.st_mtime_ns} {about.st_ino}"


def _end_with_rank_0(folder: str) -> None:
    """Wait until rank 0 is gone, and take along what it leaves where it had no time to: the `folder` of the group."""
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Be a rank until rank 0 is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    setup = RankSetup(**json.loads(sys.stdin.readline()))
    ending = threading.Thread(target=_end_with_rank_0, args=(setup.folder,), daemon=True)
    ending.start()
    torch.set_num_threads(setup.num_threads)
    keep_freed_memory()
    answers = sys.stdout
    sys.stdout = sys.stderr  # what else is printed is no answer
    try:
        rank = Rank(setup)
    except Exception as error:  # noqa: BLE001 - rank 0 tells it
        answers.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
        answers.flush()
        return
    answers.write(LOADED)
    answers.flush()
    try:
        rank.serve()
    except LostRankError as error:
        logging.getLogger(__name__).warning("rank %d ends: %s", setup.rank, error)  # on the error stream
        ending.join()  # rank 0 ends the group, or is gone; the rank that was lost first is the cause, not this one
    except BaseException:  # noqa: BLE001 - whatever it is, this rank computes no more
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # threads of gloo may still wait for others


if __name__ == "__main__":
    main()
