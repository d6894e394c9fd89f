"""`LifeConfig`: how workers are started, watched, restarted and ended."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.errors import ConfigError
from foretoken.option import Settings
from foretoken.params import check_number, check_whole

_DAY_S = 86_400.0

_setting = Settings("Workers")


@dataclass(frozen=True)
class LifeConfig:
    """Times in seconds. Beside what the options say:

    - `devices`: "" is the device of the engine's configuration. More workers than devices go round them.
    - `watchdog_s`: also for a worker that gives no sign of life for so long.
    - `failed_starts`: those that did not come to an answer.
    """

    workers: int = _setting(1, "Processes that each hold the model; requests are distributed among them.")
    devices: tuple[str, ...] = _setting(
        (),
        "The device of a worker, such as cuda:0; may be given several times, in the order of the workers.",
        repeats=True,
    )
    # Far longer than any step of a model that answers at a usable speed.
    watchdog_s: float = _setting(
        120.0, "Seconds after which a step counts as stuck: the worker is killed and restarted."
    )
    # Kubernetes kills after 30 by default; most answers take less.
    drain_s: float = _setting(30.0, "Seconds that requests in flight get after SIGTERM; 0 ends them at once.")
    first_restart_s: float = _setting(0.5, "Seconds before a worker that died is restarted; doubled with each death.")
    longest_restart_s: float = _setting(30.0, "Longest pause before a restart, in seconds.")
    good_s: float = _setting(60.0, "Seconds of service after which the pause before a restart is reset.")
    failed_starts: int = _setting(5, "Starts in a row without success after which the server gives up.")
    quarantine_s: float = _setting(
        600.0, "Seconds for which a request is refused that ran while two workers died; 0 = never."
    )
    max_waiting: int = _setting(256, "Requests of a worker that may wait; further ones get 429.")
    # Steps of an answer as long as any context here.
    max_unread_events: int = _setting(65_536, "Unread events after which a call is cancelled.")
    # Also how late the watchdog may be.
    beat_s: float = _setting(0.25, "Seconds between a worker's heartbeats.")

    def __post_init__(self) -> None:
        check_whole("workers", self.workers, low=1, high=64)
        check_whole("failed_starts", self.failed_starts, low=1)
        check_whole("max_waiting", self.max_waiting, low=1)
        check_whole("max_unread_events", self.max_unread_events, low=1)
        for name in ("watchdog_s", "first_restart_s", "longest_restart_s", "good_s", "beat_s"):
            check_number(name, getattr(self, name), low=0.0, high=_DAY_S, open_low=True)
        for name in ("drain_s", "quarantine_s"):
            check_number(name, getattr(self, name), low=0.0, high=_DAY_S)
        if self.longest_restart_s < self.first_restart_s:
            raise ConfigError("longest_restart_s", self.longest_restart_s, "must be at least first_restart_s")
        if self.watchdog_s < 2 * self.beat_s:
            raise ConfigError("watchdog_s", self.watchdog_s, f"must be at least {2 * self.beat_s:g}, two signs of life")
        if isinstance(self.devices, str) or not all(isinstance(device, str) for device in self.devices):
            raise ConfigError("devices", self.devices, "must be a list of devices, such as cuda:0,cuda:1")
        object.__setattr__(self, "devices", tuple(self.devices))

    def device_of(self, number: int) -> str | None:
        """The device of a worker, counted from 0; None for that of the engine's configuration."""
        return (self.devices[number % len(self.devices)] if self.devices else "") or None
