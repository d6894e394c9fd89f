"""A mixture of experts in place of a layer's MLP: a router, gated MLPs, and in some families a shared one.

Where the CPU's kernels run, one call does all of it (`kernels/experts.h`); the modules here are its twin in torch's own
operations, which trains, runs on other devices, and says what the call computes. On CUDA Triton kernels take its place
(`expert_launches`). Routing and the sum over experts are in float32 everywhere: a row's choice among experts must not
hang on the rounding of a score.

Shapes: T rows, D hidden size, E experts, S slots of a row (its experts, then the shared one), I intermediate size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_not
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.model.expert_config import ClampedGate, ExpertsConfig
from foretoken.model.expert_launches import ExpertParts, can_launch, launched, stacked
from foretoken.model.layers import Linear, activated
from foretoken.model.matrices.dense import ProductFields, array_of
from foretoken.model.row_kernels import RowKernels, kernels_for
from foretoken.model.sharding import Collective, SingleRank
from foretoken.transfer import to_device, to_host

# ---- the experts of a layer in one call: `kernels/experts.h`
#
# A step over one row with 8 of 128 experts would otherwise be some forty small operations a layer, and a step over
# eight rows would read an expert that several of them go to several times. The call groups the rows by expert, reads
# the weights of each expert once, and shares the experts out among the threads. A row's result does not depend on the
# others.


_EXCHANGED_ROWS = 512  # what lies between the ranks' products, at most; the one call groups as many


class ExpertsFields(ctypes.Structure):
    """`foretoken_experts`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "router", "router_bias", "shared_gate")),
        *((name, ctypes.c_int64) for name in ("num_experts", "num_active", "hidden_size")),
        *((name, ctypes.c_int32) for name in ("has_shared", "normalises", "clamps")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )


@dataclass(frozen=True)
class ExpertTable:
    """`fields` for the kernel: addresses in what is `held`. `width` channels of an expert are here, and `shared_width`
    of a shared one: on a rank its share of them.
    """

    fields: ExpertsFields
    held: tuple[object, ...]
    width: int
    shared_width: int

    @property
    def num_slots(self) -> int:
        """Experts that a row goes to, the shared one included."""
        return int(self.fields.num_active) + int(self.fields.has_shared)


def expert_table(parts: ExpertParts, dtype: torch.dtype) -> ExpertTable | None:
    """What the kernel takes for rows of `dtype`; None: a matrix has no product of ours, or a table is not float32."""
    config = parts.config
    linears = (*parts.gate_up, *parts.down)
    products = [None if linear.packed is None else linear.packed.product for linear in linears]
    tables = (parts.router, parts.router_bias, parts.shared_gate)
    is_float = all(table is None or table.dtype == torch.float32 for table in tables)
    if not is_float or any(linear.bias is not None and linear.bias.dtype != dtype for linear in linears):
        return None
    rows = [product.fields(linear.bias) for product, linear in zip(products, linears, strict=True) if product]
    if len(rows) < len(linears):
        return None
    half = len(parts.gate_up)
    gate_up, down = array_of(ProductFields, rows[:half]), array_of(ProductFields, rows[half:])
    own = tuple(None if table is None else table.detach().contiguous() for table in tables)
    clamped = config.clamped
    fields = ExpertsFields(
        *(ctypes.addressof(gate_up), ctypes.addressof(down)),
        *(None if table is None else table.data_ptr() for table in own),
        *(config.num_experts, config.num_active, parts.router.shape[1]),
        *(half > config.num_experts, config.normalises, clamped is not None),
        *((clamped.limit, clamped.alpha) if clamped is not None else (0.0, 0.0)),
    )
    weights = [(linear.packed, linear.bias) for linear in linears]
    width, shared = rows[0].num_outputs // 2, rows[half - 1].num_outputs // 2 if half > config.num_experts else 0
    return ExpertTable(fields, (gate_up, down, own, products, weights), width, shared)


def run_experts(kernels: RowKernels, table: ExpertTable, x: Tensor) -> Tensor:
    """`x` [T, D] through the experts, [T, D]."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    _call(kernels.library.foretoken_run_experts, table, x, x, out)
    return out


def _call(function: Callable[..., bool], table: ExpertTable, like: Tensor, *tensors: Tensor) -> None:
    """Give a kernel the addresses of `tensors`, for rows like those of `like`."""
    if not function(
        *(ctypes.byref(table.fields), *(tensor.data_ptr() for tensor in tensors), len(like)),
        *(like.dtype == torch.bfloat16, torch.get_num_threads()),
    ):
        raise MemoryError(f"no memory for the experts of {len(like)} rows; run fewer rows at a time")


def expert_channels(kernels: RowKernels, table: ExpertTable, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of each row, see `Experts.route`, as the kernel fills them, [T, S] int32 and [T, S] float32; and this
    rank's channels of their experts, those of shared ones last.
    """
    x = x.contiguous()
    chosen = torch.empty(len(x), table.num_slots, dtype=torch.int32)
    weights = torch.empty(len(x), table.num_slots, dtype=torch.float32)
    own = torch.empty(len(x) * (table.fields.num_active * table.width + table.shared_width), dtype=torch.float32)
    _call(kernels.library.foretoken_expert_channels, table, x, x, chosen, weights, own)
    return chosen, weights, own


def run_divided(kernels: RowKernels, table: ExpertTable, x: Tensor, collective: Collective) -> Tensor:
    """A rank's part of `run_experts`, [T, D / world]: its channels of every expert, those of all ranks in one exchange
    of so many rows, and its outputs of them.
    """
    return torch.cat(
        [_divided(kernels, table, rows.contiguous(), collective) for rows in torch.split(x, _EXCHANGED_ROWS)]
    )


def _divided(kernels: RowKernels, table: ExpertTable, x: Tensor, collective: Collective) -> Tensor:
    world = collective.world
    routed, shared = len(x) * table.fields.num_active * table.width, len(x) * table.shared_width
    chosen, weights, own = expert_channels(kernels, table, x)
    parts = torch.split(collective.all_gather(own).view(world, -1), [routed, shared], dim=1)
    widths = (table.width, table.shared_width)
    sides = [part.view(world, -1, width).transpose(0, 1) for part, width in zip(parts, widths, strict=True) if width]
    channels = torch.cat([side.reshape(-1) for side in sides])  # of all ranks, by place
    out = torch.empty(len(x), x.shape[1] // world, dtype=x.dtype)
    _call(kernels.library.foretoken_expert_outputs, table, x, chosen, weights, channels, out)
    return out


_TABLES: WeakKeyDictionary[Experts, tuple[tuple[object, ...], ExpertTable | None]] = WeakKeyDictionary()


def _table(layer: Experts, dtype: torch.dtype) -> ExpertTable | None:
    marks = (*layer.weight_marks(), dtype)
    kept = _TABLES.get(layer)
    if kept is None or any(map(is_not, kept[0], marks)):
        _TABLES[layer] = kept = (marks, expert_table(layer.parts(), dtype))
    return kept[1]


class Scores(nn.Module):
    """A small matrix that is kept in float32: a router, or the gate of a shared expert."""

    def __init__(self, num_scores: int, hidden_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_scores, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(num_scores, dtype=torch.float32)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, D] -> [T, num_scores], in float32 or wider."""
        wide = _wide(x)
        return F.linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))


class Expert(nn.Module):
    """A gated MLP, or a rank's part of it (see `layers.MLP`); gate and up share one matrix. Packed matrices multiply in
    float32 or wider, plain ones in their dtype.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, clamped: ClampedGate | None, world: int
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias)
        self.down_proj = Linear(intermediate_size * world, hidden_size // world, bias)
        self.clamped = clamped

    def channels(self, x: Tensor) -> Tensor:
        """`x` [T, D] -> [T, I]."""
        weight = self.gate_up_proj.weight
        return _gated(self.gate_up_proj(x.to(_wide(x) if weight is None else weight.dtype)), self.clamped)


class Experts(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, collective: Collective | None = None) -> None:
        super().__init__()
        self.config, self.collective = config, collective or SingleRank()
        world = self.collective.world
        self.router = Scores(config.num_experts, hidden_size, config.router_bias)
        self.experts = nn.ModuleList(
            Expert(hidden_size, config.intermediate_size, config.bias, config.clamped, world)
            for _ in range(config.num_experts)
        )
        self.shared: Expert | None = None
        self.shared_gate: Scores | None = None
        if config.shared_size:
            self.shared = Expert(hidden_size, config.shared_size, False, config.clamped, world)
            self.shared_gate = Scores(1, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, D] -> [T, D / world]."""
        kernels = kernels_for(x)
        table = None if kernels is None else _table(self, x.dtype)
        if kernels is None or table is None:
            out = launched(self, x) if self.collective.world == 1 else None
            return self.mixed(x, *self.route(x)) if out is None else out
        if self.collective.world > 1:
            return run_divided(kernels, table, x, self.collective)
        return run_experts(kernels, table, x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of each row of `x` [T, D]: experts [T, S], best first and of equal ones the first, and their
        weights [T, S]. The shared expert has the number E and the last slot.
        """
        scores = self.router(x)  # [T, E]
        ranked, order = torch.sort(scores, dim=1, descending=True, stable=True)
        chosen, best = order[:, : self.config.num_active], ranked[:, : self.config.num_active]
        if self.config.normalises:
            weights = torch.softmax(best, dim=1)
        else:
            weights = torch.softmax(scores, dim=1).gather(1, chosen)
        if self.shared_gate is None:
            return chosen, weights
        last = torch.full_like(chosen[:, :1], self.config.num_experts)
        return torch.cat((chosen, last), 1), torch.cat((weights, self.shared_gate(x).sigmoid()), 1)

    def mixed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The sum of what the experts `chosen` [T, S] make of the rows `x` [T, D], times `weights` [T, S]: [T, D].

        Slots are added in ascending order, so that a row's sum does not depend on the other rows, in float64 and then
        rounded: the compiled sum's fused multiplication. Of several ranks each gives its part of D.
        """
        placed: dict[int, list[tuple[int, int]]] = {}  # by expert, rows and slots: one wait for all experts of a layer
        for place, number in enumerate(to_host(chosen.flatten())[0]):
            placed.setdefault(number, []).append(divmod(place, chosen.shape[1]))
        numbers = sorted(placed)
        places = [to_device(list(zip(*placed[number], strict=True)), x.device) for number in numbers]
        channels = [self._expert(number).channels(x[at[0]]) for number, at in zip(numbers, places, strict=True)]
        size = x.shape[1] // self.collective.world
        parts = torch.empty(*chosen.shape, size, dtype=_wide(x), device=x.device)  # [T, S, D]
        for number, (rows, slots), own in zip(numbers, places, self._gathered(channels), strict=True):
            parts[rows, slots] = self._expert(number).down_proj(own).to(parts.dtype)
        total = torch.zeros_like(parts[:, 0])
        for slot in range(chosen.shape[1]):
            total = (total.double() + weights[:, slot, None].double() * parts[:, slot].double()).to(parts.dtype)
        return total.to(x.dtype)

    def _gathered(self, channels: list[Tensor]) -> list[Tensor]:
        """Each expert's `channels` [n, I / world] of all ranks side by side, [n, I], in one exchange."""
        world = self.collective.world
        if world == 1 or not channels:
            return channels
        flat = self.collective.all_gather(torch.cat([own.flatten() for own in channels])).view(world, -1)
        parts = torch.split(flat, [own.numel() for own in channels], dim=1)
        return [
            part.view(world, *own.shape).transpose(0, 1).flatten(1) for part, own in zip(parts, channels, strict=True)
        ]

    def stack(self) -> None:
        """Lay the weights as the kernels of their device read them, which the first rows would do otherwise."""
        weight = self._expert(0).gate_up_proj.weight
        if weight is not None and self.collective.world == 1 and can_launch(weight):
            stacked(self, weight)

    def parts(self) -> ExpertParts:
        """What the compiled call takes."""
        experts = [self._expert(number) for number in range(len(self.experts) + (self.shared is not None))]
        return ExpertParts(
            config=self.config,
            gate_up=[expert.gate_up_proj for expert in experts],
            down=[expert.down_proj for expert in experts],
            router=self.router.weight,
            router_bias=self.router.bias,
            shared_gate=None if self.shared_gate is None else self.shared_gate.weight,
        )

    def weight_marks(self) -> tuple[object, ...]:
        """Others than before once weights were replaced, which happens to all of them at once."""
        first, last = self._expert(0).gate_up_proj, self._expert(-1).down_proj
        return first.packed, last.packed, self.router.weight, first.weight, last.weight

    def _expert(self, number: int) -> Expert:
        expert = self.shared if number == len(self.experts) else self.experts[number]
        assert isinstance(expert, Expert)
        return expert


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _gated(wide: Tensor, clamped: ClampedGate | None) -> Tensor:
    """`wide` [T, 2 I], gates before ups: [T, I]."""
    if clamped is None:
        return activated(wide, "silu", is_gated=True)
    gate, up = wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return gate * torch.sigmoid(gate * clamped.alpha) * (up + 1)
