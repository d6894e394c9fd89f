"""What one matrix product costs by rows: weights in groups through our kernel, beside bf16 and torch's kernels.

python -m studies.quantised --outputs 8192 --inputs 4096 --rows 1,2,4,8,16,32 --seconds 60 --out quantised.json

All formats are in memory at once and take turns in an order drawn anew each round, so that drift hits them alike.
`--copies` matrices of each format take turns too: together they should not fit into the processor's caches. The figures
are medians of single calls; `bandwidth` is the matrix's bytes over the median at the first number of rows. The formats
q8_0 ... q6_k have the layout of GGUF files and random codes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.kernels.build import built
from foretoken.model.layers import Linear, PackedWeight
from foretoken.model.matrices.codes import SUPER, GroupedCodes, WholeScales
from foretoken.model.matrices.grouped_kernel import SOURCE, GroupedWeight, instructions
from studies.command import record, record_file

# bits, code of zero, group, whether there are minimums, whether float16 holds the scales (else they are whole numbers)
GROUPED = {
    "q8_0": (8, 128, 32, False, True),
    "q4_0": (4, 8, 32, False, True),
    "q4_1": (4, 0, 32, True, True),
    "q4_k": (4, 0, 32, True, False),
    "q5_k": (5, 0, 32, True, False),
    "q6_k": (6, 32, 16, False, False),
}
ZERO_POINTS = "gptq"  # 4 bits, a float16 scale and a zero point for 128 inputs
FORMATS = ("bf16", "torch-int8", "torch-int4", *GROUPED, ZERO_POINTS)
Times = dict[str, dict[int, list[float]]]


def main() -> None:
    """Measure, print a table and one JSON object, and with `--out` write that object into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--inputs", type=int, default=4096, help="a multiple of 256")
    parser.add_argument("--rows", default="1,2,4,8,16,32", help="rows of activations, bfloat16")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"some of {', '.join(FORMATS)}")
    parser.add_argument("--copies", type=int, default=2, help="matrices of each format")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    counts = [int(word) for word in options.rows.split(",")]
    shape = (options.outputs, options.inputs)
    matrices = {name: [matrix(name, *shape) for _ in range(options.copies)] for name in options.formats.split(",")}
    times_ms = measure(matrices, counts, options.inputs, options.seconds)
    rows = [
        {
            "format": name,
            "bytes": own[0].nbytes,
            "bandwidth_gb_s": own[0].nbytes / 1e6 / statistics.median(times_ms[name][counts[0]]),
            "median_ms": {str(count): statistics.median(times_ms[name][count]) for count in counts},
            "min_ms": {str(count): min(times_ms[name][count]) for count in counts},
        }
        for name, own in matrices.items()
    ]
    for row in rows:
        cells = " ".join(f"{row['median_ms'][str(count)]:8.2f}" for count in counts)
        print(
            f"{row['format']:>10} {row['bytes'] / 1e6:7.1f} MB {row['bandwidth_gb_s']:6.1f} GB/s  ms by rows: {cells}"
        )
    settings = {"outputs": options.outputs, "inputs": options.inputs, "num_threads": options.threads}
    about = settings | {
        "instructions": instructions(built(SOURCE)),
        "rounds": len(times_ms[rows[0]["format"]][counts[0]]),
    }
    print(json.dumps(record("quantised", about | {"formats": rows}, options.out)))


@torch.inference_mode()
def matrix(name: str, outputs: int, inputs: int) -> PackedWeight:
    """A random matrix [outputs, inputs] in one format."""
    if name in GROUPED:
        bits, zero, group, has_minimums, is_half = GROUPED[name]
        codes = torch.randint(2**bits, (outputs, inputs), dtype=torch.uint8)
        scales, whole = (torch.rand(outputs, inputs // group) * 0.01).half().float(), None
        if not is_half:
            own = torch.randint(1, 64, (outputs, inputs // group), dtype=torch.int8)
            shared = (torch.rand(outputs, inputs // SUPER) * 0.001).half()
            scales = shared.float().repeat_interleave(SUPER // group, 1) * own
            whole = WholeScales(own, shared, *((own, shared) if has_minimums else ()))
        grouped = GroupedCodes(codes, scales, scales if has_minimums else None, zero, bits, group, whole)
        return GroupedWeight.of(grouped, torch.bfloat16)
    if name == ZERO_POINTS:
        codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
        scales = (torch.rand(outputs, inputs // 128) * 0.01).half().float()
        below = -torch.randint(16, scales.shape, dtype=torch.int8)
        return GroupedWeight.of(GroupedCodes(codes, scales, scales * below, 0, 4, 128, multiples=below), torch.bfloat16)
    full = torch.randn(outputs, inputs).bfloat16()
    if name.startswith("torch-"):
        return torch_weight(name.removeprefix("torch-"), outputs, inputs)
    linear = Linear(inputs, outputs)
    linear.weight = nn.Parameter(full, requires_grad=False)
    linear.pack()
    if linear.packed is None:
        raise SystemExit("this processor has no bf16 product; leave bf16 out of --formats")
    return linear.packed


@dataclass(frozen=True)
class TorchWeight:
    """Random codes in the layout of torch's weight-only kernels: int8 with a scale per output, or int4 with a scale and
    a zero point per 64 inputs.
    """

    codes: Tensor
    scales: Tensor
    group: int | None  # inputs that share a scale; None: int8

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, [T, N]."""
        if self.group is None:
            out: Tensor = torch._weight_int8pack_mm(x, self.codes, self.scales)
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.scales)
        return out if bias is None else out + bias

    @property
    def product(self) -> None:
        """Nothing of ours multiplies by it."""
        return

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.codes.nbytes + self.scales.nbytes


def torch_weight(kind: str, outputs: int, inputs: int) -> TorchWeight:
    """A random matrix [outputs, inputs] for torch's kernels."""
    if kind == "int8":
        codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        return TorchWeight(codes, torch.rand(outputs).bfloat16() * 0.01, None)
    stored = torch.randint(16, (outputs, inputs), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(stored, 1)
    return TorchWeight(packed, torch.rand(inputs // 64, outputs, 2).bfloat16() * 0.01, 64)


@torch.inference_mode()
def measure(matrices: dict[str, list[PackedWeight]], counts: list[int], inputs: int, seconds: float) -> Times:
    """Milliseconds of single calls by format and rows; the first round only warms up."""
    order, generator = random.Random(0), torch.Generator().manual_seed(0)
    times_ms: Times = {name: {count: [] for count in counts} for name in matrices}
    end, is_warm = time.monotonic() + seconds, False
    while time.monotonic() < end or not is_warm or not times_ms[next(iter(matrices))][counts[0]]:
        turns = [(name, weight, count) for name, own in matrices.items() for weight in own for count in counts]
        order.shuffle(turns)
        for name, weight, count in turns:
            x = torch.randn(count, inputs, generator=generator).bfloat16()
            began = time.perf_counter()
            weight.multiply(x, None)
            if is_warm:
                times_ms[name][count].append((time.perf_counter() - began) * 1e3)
        is_warm = True
    return times_ms


if __name__ == "__main__":
    main()
