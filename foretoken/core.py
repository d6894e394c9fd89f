"""Types shared by all packages: Request, Batch, Draft, Verdict, StepOutput.

All are frozen; lengths are properties. Index conventions, used everywhere:

    B requests in a step, N draft nodes over all of them, R = B + N rows with target logits.
    Request b owns nodes offsets[b] .. offsets[b + 1]; its rows are its anchor, then its nodes, in order, so
        row of request b's anchor   = offsets[b] + b
        row of request b's node i   = offsets[b] + b + 1 + i        (i counts from 0 inside the request)
    Row r holds the target's distribution of the token that FOLLOWS that row's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from foretoken.config import SamplingParams, SpecConfig
from foretoken.transfer import to_device, to_host

NextKind = Literal["bonus", "residual"]
TokenKind = Literal["accepted", "residual", "bonus", "plain"]
FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True)
class Request:
    """A request as submitted. `seed` is always set: the user's, or a generated one."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    spec: SpecConfig
    seed: int
    prediction_ids: tuple[int, ...] = ()  # the expected output, if the caller gave one


class Processors(Protocol):
    """Processes logits by a request's own parameters, position by position: penalties, bias, bans, grammar."""

    def adjust(self, logits: Tensor, paths: Sequence[tuple[int, ...]], is_draft: bool = False) -> Tensor:
        """Logits `[n, V]` behind the text and `paths[i]` -> the same, processed; a dead row of a draft says nothing."""

    def forced(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens of text that is forced next; () if there is a choice. Other tokens may spell it too."""

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """For each node of a tree behind the committed text if it and those before it may follow; True if unknown."""


class Noise(Protocol):
    """The noise of the coupled rule for one request."""

    @property
    def key(self) -> tuple[int, int]:
        """The two words that key its random numbers."""

    def at(self, positions: Sequence[int]) -> Tensor:
        """Exp(1) noise `[n, V]` for the tokens at absolute `positions` of the text."""

    def rows(self, positions: Sequence[int]) -> Tensor | RaceRows:
        """The same for `verify.race_winners`, which need not read all of it."""


@dataclass(frozen=True)
class RaceRows:
    """Noise of one request at absolute `positions` [n] of its text, of which only what is read has to be made."""

    noise: Noise
    positions: tuple[int, ...]


@dataclass(frozen=True)
class BatchEntry:
    """One request's part in a step.

    `pending` are committed tokens whose K/V the target does not hold yet; the last one is the anchor. If `decodes` is
    false the entry is a chunk of a longer prompt: nothing is drafted or emitted. `processors` is None for a request
    whose distribution depends on the logits, temperature and filters alone, `noise` where the rule is not coupled.
    """

    request: Request
    start: int  # tokens already in the target's KV cache
    pending: tuple[int, ...]
    decodes: bool
    num_draft: int  # maximum number of nodes, 0 included
    processors: Processors | None = None
    noise: Noise | None = None
    draft_probability: float = 1.0  # probability that a position is drafted
    takes_trees: bool = True  # whether the request's rule accepts trees
    num_probe: int = 0  # maximum number of probes, 0 included
    probe_depth: int = 0  # maximum depth of a probe below the anchor (its child: 1), within the context
    option: int | None = None  # which of the request's drafter options runs; None: no draft
    num_prompt_rows: int = 0  # last ones of `pending`, before the anchor: log-probabilities of what follows are wanted
    next_token: int | None = None  # behind `pending`, for a chunk; what follows an anchor is what the step finds out

    @property
    def round_start(self) -> int:
        """Number of committed tokens when the round begins: the absolute position of the first drafted token."""
        return self.start + len(self.pending)

    def under(self, request: Request, num_draft: int) -> BatchEntry:
        """The same entry for another drafter option of the request, with another number of draft tokens."""
        entry = object.__new__(BatchEntry)
        # `replace` goes through every field, for every drafter option in every round.
        entry.__dict__.update(self.__dict__, request=request, num_draft=num_draft)
        return entry


@dataclass(frozen=True)
class Batch:
    """The requests of one step. `entries` that decode come first, so that rows and entries line up."""

    entries: tuple[BatchEntry, ...]

    @cached_property
    def decoding(self) -> tuple[BatchEntry, ...]:
        """The entries that emit tokens in this step: B of them."""
        return tuple(entry for entry in self.entries if entry.decodes)

    @cached_property
    def only_decodes(self) -> bool:
        """Whether no prompt is read in the step."""
        return all(entry.decodes and len(entry.pending) == 1 for entry in self.entries)


@dataclass(frozen=True)
class TapRequest:
    """The hidden states (taps) that drafters want from one step of the target.

    `layers` are tapped at the R rows of the decoding entries; for the requests `whole` also at every other row of
    theirs, chunks of prompts included. Tap `l` is the residual stream after `l` layers. Without layers nothing is
    tapped.
    """

    layers: tuple[int, ...] = ()
    whole: frozenset[int] = frozenset()  # request ids

    def num_rows(self, entry: BatchEntry, num_answered: int) -> int:
        """Rows of `entry`, from its last, whose taps are wanted; `num_answered`: of its anchor, nodes and probes."""
        if not self.layers:
            return 0
        if entry.request.request_id in self.whole:
            return len(entry.pending) + max(0, num_answered - 1)
        return num_answered


NO_TAPS = TapRequest()


@dataclass(frozen=True)
class Mass:
    """The distributions that drafted tokens were sampled from, as sub-probability mass (`sum(mu) <= 1`).

    `distributions` [M, V] float32; `distribution_of_row[r]` is the index of the distribution from which a child of row
    r was, or could have been, sampled, -1 if none could. A deterministic child needs no distribution: its mass is 1 at
    its own token. A row with a distribution and no sampled child had a sample of "nothing". Several sampled children of
    one row were sampled without replacement, in the order of the nodes: each from the row's distribution without its
    earlier sampled siblings, rescaled to the original sum.
    """

    distributions: Tensor
    distribution_of_row: tuple[int, ...]


@dataclass(frozen=True)
class Probes:
    """Tokens that drafters add to the target's forward besides their drafted tokens, P of them over B requests.

    `tokens` [P] int64; `parents` [P] indexed within the request's probes (-1 = anchor), parents before their children.
    Probes are neither verified nor committed: the drafter reads the target's logits after them (`Feedback`).
    """

    tokens: Tensor
    parents: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.offsets[0] == 0
        assert self.offsets[-1] == len(self.parents) == self.tokens.shape[0]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of probes of each request."""
        return tuple(stop - start for start, stop in zip(self.offsets, self.offsets[1:], strict=False))

    def rows_of(self, requests: Sequence[int]) -> list[int]:
        """Indices in `tokens` of some requests' probes, in the given order."""
        return [row for b in requests for row in range(self.offsets[b], self.offsets[b + 1])]

    def select(self, requests: Sequence[int]) -> Probes:
        """The probes of some requests only, in the given order."""
        rows = self.rows_of(requests)
        tokens = self.tokens[to_device(rows, self.tokens.device)]
        offsets = (0, *accumulate(self.lengths[b] for b in requests))
        return Probes(tokens, tuple(self.parents[row] for row in rows), offsets)


@dataclass(frozen=True)
class Draft:
    """Drafted tokens for B requests, a tree each: `tokens` [N] int64, `parents` [N] indexed within the request (-1 =
    anchor).

    `sampled[i]` says that node i was sampled from its parent row's distribution in `mass`; otherwise it is
    deterministic. Parents come before their children. `drafters[b]` names the drafter of request b (None: none ran for
    it, as where it had no room); if there were several, `provenance` [N] names the drafter of every node (None: the
    request's drafter). `probes` are not nodes.
    `inner[b]` counts the tokens that the drafter itself verified while it drafted for request b, and how many of them
    it accepted.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    offsets: tuple[int, ...]
    drafters: tuple[str | None, ...]
    sampled: tuple[bool, ...] = ()
    mass: Mass | None = None
    provenance: tuple[str | None, ...] = ()
    probes: Probes | None = None
    inner: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert self.misfit() is None, self.misfit()

    def misfit(self) -> str | None:
        """Which field does not fit the others in its length; None where all do."""
        num_requests, num_nodes = self.num_requests, self.num_nodes
        if self.offsets[0] != 0 or not self.offsets[-1] == num_nodes == self.tokens.shape[0]:
            return f"offsets {self.offsets} of {num_nodes} parents and {self.tokens.shape[0]} tokens"
        if len(self.drafters) != num_requests:
            return f"{len(self.drafters)} drafters for {num_requests} requests"
        for name, count in (("sampled", num_nodes), ("provenance", num_nodes), ("inner", num_requests)):
            if getattr(self, name) and len(getattr(self, name)) != count:
                return f"{name} of length {len(getattr(self, name))}, not {count}"
        if self.mass is None and any(self.sampled):
            return "sampled tokens without a mass"
        if self.probes is not None and len(self.probes.offsets) != len(self.offsets):
            return f"probes for {len(self.probes.offsets) - 1} requests, not {num_requests}"
        return None

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.parents)

    @property
    def num_rows(self) -> int:
        """R = B + N."""
        return self.num_requests + self.num_nodes

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of nodes of each request."""
        return tuple(stop - start for start, stop in zip(self.offsets, self.offsets[1:], strict=False))

    @cached_property
    def probe_lengths(self) -> tuple[int, ...]:
        """Number of probes of each request."""
        return (0,) * self.num_requests if self.probes is None else self.probes.lengths

    def is_chain(self, request: int) -> bool:
        """Whether every node of `request` follows the one before it."""
        own = self.parents[self.offsets[request] : self.offsets[request + 1]]
        return own == tuple(range(-1, len(own) - 1))

    def paths(self, request: int) -> list[tuple[int, ...]]:
        """For every row of `request` (anchor, then nodes) the drafted tokens on the path to it, its own included."""
        start, stop = self.offsets[request], self.offsets[request + 1]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.host_tokens[start:stop], self.parents[start:stop], strict=True):
            paths.append((*paths[1 + parent], token))
        return paths

    @cached_property
    def host_tokens(self) -> list[int]:
        """The nodes' tokens [N] on the host; the first call waits for the device."""
        return list[int](to_host(self.tokens)[0]) if self.parents else []

    @property
    def has_host_tokens(self) -> bool:
        """Whether `host_tokens` needs no transfer."""
        return not self.parents or "host_tokens" in self.__dict__ or self.tokens.device.type == "cpu"

    def with_host_tokens(self, tokens: list[int]) -> Draft:
        """This draft, whose tokens are known on the host."""
        self.__dict__["host_tokens"] = tokens
        return self

    def depths(self, request: int) -> list[int]:
        """Depth of each node of `request`; a child of the committed text has depth 1."""
        depths: list[int] = []
        for parent in self.parents[self.offsets[request] : self.offsets[request + 1]]:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def anchor_row(self, request: int) -> int:
        """Row of the target's distribution right after the committed text of `request`."""
        return self.offsets[request] + request

    @cached_property
    def parent_rows(self) -> tuple[int, ...]:
        """For every node the row of its parent, whose distribution it is verified against, `[N]`."""
        rows: list[int] = []
        for b, (start, stop) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            first = start + b + 1
            rows += [first + parent for parent in self.parents[start:stop]]
        return tuple(rows)

    def provenance_of(self, request: int) -> list[str | None]:
        """The drafter of each node of `request`."""
        if not self.provenance:
            return [self.drafters[request]] * self.lengths[request]
        own = self.provenance[self.offsets[request] : self.offsets[request + 1]]
        return [self.drafters[request] if source is None else source for source in own]

    def select(self, requests: Sequence[int]) -> Draft:
        """The draft of some requests only, in the given order, over the same distributions."""
        if tuple(requests) == tuple(range(self.num_requests)):
            return self
        nodes = [node for b in requests for node in range(self.offsets[b], self.offsets[b + 1])]
        host = [self.host_tokens[node] for node in nodes] if self.has_host_tokens else None
        mass = self.mass
        if mass is not None:
            mass = Mass(mass.distributions, tuple(mass.distribution_of_row[row] for row in self.rows_of(requests)))
        found = Draft(
            tokens=self.tokens[to_device(nodes, self.tokens.device)]
            if host is None
            else to_device(host, self.tokens.device),
            parents=tuple(self.parents[node] for node in nodes),
            offsets=(0, *accumulate(self.lengths[b] for b in requests)),
            drafters=tuple(self.drafters[b] for b in requests),
            sampled=tuple(self.sampled[node] for node in nodes) if self.sampled else (),
            mass=mass,
            provenance=tuple(self.provenance[node] for node in nodes) if self.provenance else (),
            probes=None if self.probes is None else self.probes.select(requests),
            inner=tuple(self.inner[b] for b in requests) if self.inner else (),
        )
        return found if host is None else found.with_host_tokens(host)

    def on(self, device: torch.device | str) -> Draft:
        """The same draft with its tensors on `device`."""
        if self.tokens.device == torch.device(device) and self.mass is None and self.probes is None:
            return self
        mass = self.mass and replace(self.mass, distributions=to_device(self.mass.distributions, device, None))
        probes = self.probes and replace(self.probes, tokens=to_device(self.probes.tokens, device))
        moved = replace(self, tokens=to_device(self.tokens, device), mass=mass, probes=probes)
        return moved.with_host_tokens(self.host_tokens) if self.has_host_tokens else moved

    def rows_of(self, requests: Sequence[int]) -> list[int]:
        """Rows (anchor, then nodes) of some requests, in the given order."""
        return [row for b in requests for row in range(self.offsets[b] + b, self.offsets[b + 1] + b + 1)]


def empty_draft(num_requests: int, device: torch.device | str = "cpu") -> Draft:
    """A draft without nodes."""
    tokens = torch.empty(0, dtype=torch.int64, device=device)
    return Draft(tokens, (), (0,) * (num_requests + 1), (None,) * num_requests)


@dataclass(frozen=True)
class Uniforms:
    """The random numbers of a rule: one test per node and one draw per request, each in [0, 1) float64.

    `race[b]` is Exp(1) noise for the rows of request b, one number per token, the same at every row of one absolute
    position for any drafter; None if the request's rule does not need it.
    """

    accept: Tensor  # [N]
    next: Tensor  # [B]
    race: tuple[Tensor | RaceRows | None, ...] = ()  # [B] of [rows, V]; () = not needed


@dataclass(frozen=True)
class Verdict:
    """The outcome of verification: for each request the accepted path, then one token of the target.

    `probabilities[b]` holds for every node of request b the conditional probability of accepting it given that its
    parent was accepted; None where the rule did not compute it.
    """

    paths: tuple[tuple[int, ...], ...]  # accepted nodes, root to leaf, indexed within the request
    accepted: tuple[tuple[int, ...], ...]  # their tokens
    next_tokens: tuple[int, ...]
    next_kinds: tuple[NextKind, ...]
    probabilities: tuple[tuple[float | None, ...], ...] = ()

    def emitted(self, request: int) -> tuple[int, ...]:
        """Tokens emitted for one request: the accepted ones and the target's own."""
        return (*self.accepted[request], self.next_tokens[request])


@dataclass(frozen=True)
class TokenOrigin:
    """Provenance of one emitted token: the drafter (None = the target itself), its kind, and the request's round.

    `probability` is the conditional acceptance probability of an accepted token given its accepted parent; None for the
    target's own tokens, and under the coupled rule, which has no such probability.
    """

    drafter: str | None
    kind: TokenKind
    step: int
    probability: float | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability and rank (1 = most probable) of one token, and of the most probable tokens, or of those that the
    request lists, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """The output of one step for one request."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str  # text completed in this step; stop strings and half characters are withheld
    provenance: tuple[TokenOrigin, ...]
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __str__(self) -> str:
        return self.text
