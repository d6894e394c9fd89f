"""Does drafting in another process, ahead while the target verifies, pay beside drafting in the target's own?

    python -m studies.remote_draft --target DIR --draft DIR --num-draft 3,5

Three sides answer the same prompts in turns, one request at a time, greedy: plain decoding and `draft_model` with all
`--threads` in one process, and a drafter in another process with one thread, the target then with one less. That one
goes on drafting behind its own draft tokens, so that a draft that was accepted whole is followed by one that is ready;
after any other it starts anew. Whatever is late or lost costs draft tokens: the target waits `--patience-ms` at most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from foretoken import LLM, SamplingParams, SpecConfig, add_drafter
from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Factory, Feedback
from foretoken.model.interface import Segment
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file, setting_of, whole_numbers

PLAIN_SIDE, OWN_SIDE, REMOTE_SIDE = "plain", "same process", "other process"
_END_S = 10.0
Told = tuple[int, tuple[int, ...]] | None  # which round, and what the text grew by; round 0 begins a text; None: end


def draft_ahead(pipe: Connection, draft: str, dtype: str, num_ahead: int, cache_tokens: int) -> None:
    """The other process: after every token that it drafts it sends its round and all tokens behind the text so far."""
    torch.set_num_threads(1)
    model = open_model(model_folder(draft), dtype, "cpu", cache_tokens)
    model.open(0)
    text, ahead, number = list[int](), list[int](), 0
    with suppress(EOFError, OSError):  # the target's process is gone
        pipe.send((number, ()))  # loaded
        while True:
            while pipe.poll(None if not text or len(ahead) >= num_ahead else 0):
                told: Told = pipe.recv()
                if told is None:
                    return
                number, grown = told
                if number == 0:
                    text, ahead = [], []
                    model.rollback(0, 0)
                as_drafted = tuple(ahead[: len(grown)]) == grown
                text += grown
                ahead = ahead[len(grown) :] if as_drafted else []
                model.rollback(0, min(model.length(0), len(text) + len(ahead) if as_drafted else len(text) - 1))
                if ahead:
                    pipe.send((number, tuple(ahead)))
            missing = (text + ahead)[model.length(0) :]
            with torch.inference_mode():
                logits = model.forward(torch.tensor(missing), [Segment(0, len(missing))]).logits
            model.commit(0, len(missing))
            ahead.append(int(logits[-1].argmax()))
            pipe.send((number, tuple(ahead)))


class RemoteDrafter:
    """Takes what another process has drafted by the time that it is asked, and waits `patience_s` at most for more.

    Draft tokens are the other model's most probable ones: deterministic, so that a wrong one only costs a row.
    """

    name = "remote"

    def __init__(self, pipe: Connection, patience_s: float) -> None:
        self._pipe, self._patience_s, self._round = pipe, patience_s, 0
        self.is_lost, self.num_late = False, 0

    def start(self, request: Request) -> None:
        """Tell the other process a new text."""
        self._round = 0
        self._tell((0, tuple(request.prompt_ids)))

    def propose(self, batch: Batch) -> Draft:
        """What has come for this round; one request at a time."""
        (entry,) = batch.decoding
        tokens = self._arrived(entry.num_draft)[: entry.num_draft]
        self.num_late += len(tokens) < entry.num_draft
        parents, names = tuple(range(-1, len(tokens) - 1)), (self.name if tokens else None,)
        return Draft(torch.tensor(tokens, dtype=torch.int64), parents, (0, len(tokens)), names)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Tell the other process what the text grew by."""
        self._round += 1
        self._tell((self._round, tuple(verdict.emitted(0))))

    def finish(self, request_id: int) -> None:
        """Nothing is kept for a request."""

    def _tell(self, told: Told) -> None:
        try:
            if not self.is_lost:
                self._pipe.send(told)
        except OSError:
            self.is_lost = True

    def _arrived(self, count: int) -> tuple[int, ...]:
        found, ends = tuple[int, ...](), time.monotonic() + self._patience_s
        try:
            while not self.is_lost and len(found) < count and self._pipe.poll(max(0.0, ends - time.monotonic())):
                number, tokens = self._pipe.recv()
                if number == self._round:
                    found = tokens
        except (EOFError, OSError):
            self.is_lost = True
        return found


class Remote:
    """The other process, and the drafter here; registered as `remote` for as long as this program runs."""

    def __init__(self, draft: str, dtype: str, num_ahead: int, cache_tokens: int, patience_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        own, other = context.Pipe()
        self.process = context.Process(
            target=draft_ahead, args=(other, draft, dtype, num_ahead, cache_tokens), daemon=True
        )
        self.process.start()
        other.close()
        own.recv()  # it has loaded
        self._pipe = own
        self.drafter = drafter = RemoteDrafter(own, patience_s)

        def make(factory: Factory, spec: SpecConfig) -> RemoteDrafter:  # noqa: ARG001
            return drafter

        add_drafter("remote", make)

    def close(self) -> None:
        """End the other process."""
        with suppress(OSError):
            self._pipe.send(None)
        self.process.join(_END_S)
        self.process.kill()


def main() -> int:
    """Measure, print the table, and with `--out` write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.remote_draft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-draft", type=whole_numbers, default=(3, 5))
    parser.add_argument("--threads", type=int, default=2, help="of all processes together")
    parser.add_argument("--patience-ms", type=float, default=50.0)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    before, room = torch.get_num_threads(), options.prompt + options.tokens + 64
    most = max(options.num_draft)
    remote = Remote(options.draft, options.dtype, 2 * most + 1, room, options.patience_ms / 1e3)
    try:
        with LLM(options.target, SpecConfig(), dtype=options.dtype, cache_tokens=4 * room) as llm:
            found = [_measured(llm, num_draft, remote, options) for num_draft in options.num_draft]
    finally:
        remote.close()
        torch.set_num_threads(before)
    record("remote_draft", {**setting_of(options), "results": found}, options.out)
    Console().line(
        f"| draft tokens | {' | '.join(found[0]['tokens_per_s'])} | tokens a step: same, other process | answers |"
    )
    for one in found:
        speeds = " | ".join(f"{statistics.median(own):.1f}" for own in one["tokens_per_s"].values())
        steps = ", ".join(f"{statistics.mean(one['tokens_per_step'][side]):.2f}" for side in (OWN_SIDE, REMOTE_SIDE))
        same = "equal" if one["equal"] else "differ"
        Console().line(f"| {one['num_draft']} | {speeds} | {steps} | {same} |")
    return 0


def _measured(llm: LLM, num_draft: int, remote: Remote, options: argparse.Namespace) -> dict[str, Any]:
    """Every turn's speed on all sides, and whether all gave the same tokens."""
    generator = torch.Generator().manual_seed(num_draft)
    shape = (options.prompts, options.prompt)
    prompts: list[list[int]] = torch.randint(llm.target.vocab_size, shape, generator=generator).tolist()
    sides = {
        PLAIN_SIDE: (SpecConfig(), options.threads),
        OWN_SIDE: (SpecConfig("draft_model", options.draft, num_draft=num_draft), options.threads),
        REMOTE_SIDE: (SpecConfig("remote", num_draft=num_draft), max(1, options.threads - 1)),
    }
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    per_step: dict[str, list[float]] = {side: [] for side in sides}
    answers, late = set[tuple[tuple[int, ...], ...]](), remote.drafter.num_late
    for turn in range(options.repeats + 1):  # the first warms up
        for side, (spec, num_threads) in sorted(sides.items(), reverse=bool(turn % 2)):
            torch.set_num_threads(num_threads)
            began = time.perf_counter()
            outputs = [_answer(llm, prompt, spec, options.tokens) for prompt in prompts]
            elapsed_s = time.perf_counter() - began
            answers.add(tuple(tokens for tokens, _ in outputs))
            if turn:
                speeds[side].append(options.prompts * options.tokens / elapsed_s)
                per_step[side].append(options.prompts * options.tokens / sum(steps for _, steps in outputs))
    found = {"num_draft": num_draft, "tokens_per_s": speeds, "tokens_per_step": per_step, "equal": len(answers) == 1}
    return found | {"late_rounds": remote.drafter.num_late - late}


def _answer(llm: LLM, prompt: Sequence[int], spec: SpecConfig, num_tokens: int) -> tuple[tuple[int, ...], int]:
    """Greedy tokens, and steps that they took."""
    (out,) = llm.generate([list(prompt)], SamplingParams(max_tokens=num_tokens, ignore_eos=True), spec)
    return out.token_ids, out.stats.num_steps


if __name__ == "__main__":
    sys.exit(main())
