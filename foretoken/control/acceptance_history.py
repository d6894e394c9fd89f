"""What is known of drafters from rounds that ended: for one request, for texts of one label, for all of them.

A request begins with what earlier ones of its label showed; a label with what all showed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from foretoken.control.acceptance import PlaceAcceptance, RequestAcceptance
from foretoken.control.previews import ChanceClasses, Preview, PreviewCalibration

_MOST_LABELS = 256


@dataclass
class RequestHistory:
    """What is known of one request, by drafter."""

    label: str
    survivals: dict[Hashable, RequestAcceptance] = field(default_factory=dict)
    calibrations: dict[Hashable, PreviewCalibration] = field(default_factory=dict)
    untried: dict[Hashable, int] = field(default_factory=dict)  # rounds since it guessed
    in_use: Hashable | None = None
    trial_tokens: float | None = None  # that were expected of this round's trial


@dataclass
class _Shared:
    """What is known of many requests together, by drafter."""

    survivals: dict[Hashable, PlaceAcceptance] = field(default_factory=dict)
    calibrations: dict[Hashable, PreviewCalibration] = field(default_factory=dict)


class AcceptanceHistory:
    """Acceptance by drafter, request and label."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestHistory] = {}
        self._every = _Shared()
        self._labels: OrderedDict[str, _Shared] = OrderedDict()  # used last at the end
        self._classes: dict[Hashable, ChanceClasses] = {}

    def of(self, request_id: int, label: str = "") -> RequestHistory:
        """What is known of a request; `label` counts when it is first named."""
        return self.requests.setdefault(request_id, RequestHistory(label))

    def shares(self, request_id: int, drafter: Hashable, num_places: int) -> tuple[list[float], list[float]]:
        """For each of the first places of a draft the share of rounds in which something is guessed there, and in which
        it is emitted.
        """
        known = self.of(request_id)
        if drafter in known.survivals:
            return known.survivals[drafter].shares(num_places)
        shared = (self._alike(known.label).survivals, self._every.survivals)
        return next((own[drafter] for own in shared if drafter in own), PlaceAcceptance()).shares(num_places)

    def chances(self, request_id: int, drafter: Hashable, look: Preview) -> list[float]:
        """The chance of each guess that is ready to be emitted."""
        return self._calibration(request_id, drafter).chances(look)

    def is_new(self, request_id: int, drafter: Hashable) -> bool:
        """Whether the drafter never guessed for the request."""
        return request_id not in self.requests or drafter not in self.requests[request_id].survivals

    def observe_round(
        self, request_id: int, drafter: Hashable, num_offered: int, chances: Sequence[float], parents: Sequence[int]
    ) -> None:
        """Take in which guesses of a request stood: for each place the chance of being emitted."""
        known = self.of(request_id)
        every = self._every.survivals.setdefault(drafter, PlaceAcceptance())
        alike = self._alike(known.label).survivals.setdefault(drafter, PlaceAcceptance(every))
        known.survivals.setdefault(drafter, RequestAcceptance(alike)).observe(num_offered, chances, parents)
        for survival in dict.fromkeys((alike, every)):
            survival.observe(num_offered, chances, parents)

    def observe_preview(self, request_id: int, drafter: Hashable, look: Preview, found: Sequence[bool | None]) -> None:
        """Take in how guesses that were shown compare with what was emitted: True right, None not judged."""
        own = self._calibration(request_id, drafter)
        calibration: PreviewCalibration | None = own
        while calibration is not None:
            calibration.observe(look, found)
            calibration = calibration.prior
        own.classes.observe(look, found)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self.requests.pop(request_id, None)

    def _alike(self, label: str) -> _Shared:
        """What is known of texts of one label; the empty one is all texts'. The label unused longest is forgotten
        first.
        """
        if not label:
            return self._every
        if label not in self._labels:
            self._labels[label] = _Shared()
            if len(self._labels) > _MOST_LABELS:
                self._labels.popitem(last=False)
        self._labels.move_to_end(label)
        return self._labels[label]

    def _calibration(self, request_id: int, drafter: Hashable) -> PreviewCalibration:
        known = self.of(request_id)
        if drafter not in known.calibrations:
            classes = self._classes.setdefault(drafter, ChanceClasses())
            every = self._every.calibrations.setdefault(drafter, PreviewCalibration(classes, slow=True))
            alike = self._alike(known.label).calibrations.setdefault(
                drafter, PreviewCalibration(classes, every, slow=True)
            )
            known.calibrations[drafter] = PreviewCalibration(classes, alike)
        return known.calibrations[drafter]
