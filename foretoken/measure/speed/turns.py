"""How settings are compared: every setting answers every prompt in turn.

The speed of a machine drifts. Settings therefore take turns at each prompt, in an order that rotates, so that drift
affects all alike. Only ratios within one run are meaningful.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretoken.backend.answering import Answer, answer_from
from foretoken.errors import ForetokenError, InputError, ModelError, StorageError
from foretoken.machine.neighbours import OtherLoad
from foretoken.measure.kept import KeptFile
from foretoken.measure.progress import Tell
from foretoken.measure.speed.contenders import Contender
from foretoken.measure.speed.plan import ENGINE, SpeedPlan, SpeedSample, SpeedSetting

_Place = tuple[str, int, float, int]  # setting, prompt, temperature, repeat


class Samples:
    """The answers so far, with a `path` also in a file, whose answers of an earlier run are taken over.

    `run` is what must agree with it; answers of a setting that is not in `settings`, by name, are passed over.

    Raises:
        InputError, StorageError: see `KeptFile`.
    """

    def __init__(
        self,
        path: Path | None = None,
        run: Mapping[str, Any] = MappingProxyType({}),
        settings: Mapping[str, SpeedSetting] = MappingProxyType({}),
    ) -> None:
        self.all: list[SpeedSample] = []
        self._places: set[_Place] = set()
        self._file = KeptFile(path, "bench speed", run)
        self._file.restored(lambda line: self._restore(line, settings))

    def __contains__(self, place: _Place) -> bool:
        return place in self._places

    def add(self, sample: SpeedSample) -> None:
        """Keep an answer, on disk before this returns.

        Raises:
            StorageError: the file cannot be written.
        """
        self._keep(sample)
        self._file.append(asdict(sample) | {"setting": sample.setting.name})

    def drop(self, setting: SpeedSetting) -> None:
        """Leave out a setting's answers; the file keeps them."""
        self.all = [sample for sample in self.all if sample.setting != setting]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _keep(self, sample: SpeedSample) -> None:
        self.all.append(sample)
        self._places.add((sample.setting.name, sample.prompt_index, sample.temperature, sample.repeat))

    def _restore(self, values: Mapping[str, Any], settings: Mapping[str, SpeedSetting]) -> None:
        setting = settings.get(values["setting"])
        if setting is None:
            return
        own = {one.name: values[one.name] for one in fields(SpeedSample)}
        self._keep(SpeedSample(**own | {"setting": setting, "answer": answer_from(values["answer"])}))


def measure(
    contenders: Sequence[Contender],
    plan: SpeedPlan,
    tell: Tell = lambda _: None,
    samples: Samples | None = None,
    others: OtherLoad | None = None,
    added: Callable[[SpeedSample], None] = lambda _: None,
) -> tuple[list[SpeedSample], list[str]]:
    """Run the plan; return the samples, and a note for every other engine that failed and was left out.

    A setting of our own is left out only if it is optional and what it needs is missing or does not fit.
    `tell` is called with a setting's name before each answer. What `samples` has already is not run again; new
    answers are added to it. `others` watches the cores meanwhile;
    `added` is called with each new sample.

    Raises:
        ForetokenError: foretoken itself failed, or the samples cannot be written.
    """
    notes: list[str] = []
    active = list(contenders)
    store = Samples() if samples is None else samples

    def run(contender: Contender, index: int, temperature: float, repeat: int) -> Answer | None:
        tell(contender.setting.name)
        try:
            return contender.answer(plan.prompts[index], plan.params(temperature, index, repeat))
        except ForetokenError as error:
            unusable = contender.setting.optional and isinstance(error, InputError | ModelError | StorageError)
            if contender.setting.engine == ENGINE and not unusable:
                raise
            notes.append(f"{contender.setting.name} was left out: {error}")
            active.remove(contender)
            store.drop(contender.setting)
            return None

    for contender in list(active):
        own = plan.places_of(contender.setting)
        for temperature, turn in itertools.product(plan.temperatures_of(contender.setting), range(plan.warmup)):
            if contender in active and not _is_done(contender, plan, temperature, store):
                run(contender, own[turn % len(own)], temperature, 0)
    places = itertools.product(range(plan.repeats), plan.temperatures, range(len(plan.prompts)))
    for turn, (repeat, temperature, index) in enumerate(places):
        able = [one for one in active if temperature in plan.temperatures_of(one.setting)]
        for contender in _rotated([one for one in able if one.setting.runs_on(plan.prompts[index])], turn):
            if (contender.setting.name, index, temperature, repeat) in store:
                continue
            if others is not None:
                others.start()
            answer = run(contender, index, temperature, repeat)
            if answer is not None:
                share = None if others is None else others.share()
                name = plan.prompts[index].slice
                sample = SpeedSample(contender.setting, index, name, temperature, repeat, answer, share)
                store.add(sample)
                added(sample)
    return list(store.all), notes


def _is_done(contender: Contender, plan: SpeedPlan, temperature: float, store: Samples) -> bool:
    """Whether nothing is left to run at a temperature."""
    setting = contender.setting
    places = itertools.product(plan.places_of(setting), range(plan.repeats))
    return all((setting.name, index, temperature, repeat) in store for index, repeat in places)


def _rotated(contenders: list[Contender], turn: int) -> list[Contender]:
    first = turn % len(contenders) if contenders else 0
    return contenders[first:] + contenders[:first]
