"""The interpreter exits while requests run: with the program's own exit code, and no word of a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import atexit, sys, threading, time
import torch
from foretoken import LLM, AsyncEngine, SamplingParams
torch.set_num_threads(1)
llm = LLM("reference:target", cache_tokens=8192, profile="off")
params = SamplingParams(max_tokens=1900, ignore_eos=True)
"""
PROGRAMS = {
    "an engine": """
engine = AsyncEngine(llm)
tickets = [engine.submit("def f", params) for _ in range(4)]
next(iter(tickets[0]))
""",
    "a thread of the program": """
begun = threading.Event()
call = lambda: llm.generate("def f", params, on_step=lambda outputs: begun.set())
threading.Thread(target=call, daemon=True).start()
begun.wait()
""",
    "an engine that a function of the program closes": """
engine = AsyncEngine(llm)
atexit.register(engine.close)
ticket = engine.submit("def f", params)
atexit.register(lambda: print(ticket.result().finish_reason))
atexit.register(ticket.cancel)
next(iter(ticket))
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_exits_while_requests_run(name: str) -> None:
    """Python ends daemon threads where they stand: one in torch ended the process with SIGABRT, often."""
    root = Path(__file__).resolve().parents[2]
    program = f"{BEGIN}{PROGRAMS[name]}sys.exit(3)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == ("abort\n" if "closes" in name else "")
