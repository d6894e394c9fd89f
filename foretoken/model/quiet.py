"""What transformers would write to the user's terminal while it loads, kept for our own errors instead."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self, reports: list[str]) -> None:
        super().__init__()
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        self._reports.append(record.getMessage())


@contextmanager
def quiet_transformers() -> Iterator[list[str]]:
    """Keep warnings, reports and progress bars of transformers off the terminal; yields its reports as they come.

    Levels, handlers and bars are as before afterwards.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as library

    library.get_verbosity()  # sets up the handler that is replaced here
    logger = logging.getLogger("transformers")
    handlers, propagate, bars, hub_bars = (
        logger.handlers,
        logger.propagate,
        library.is_progress_bar_enabled(),
        not are_progress_bars_disabled(),
    )
    reports: list[str] = []
    logger.handlers, logger.propagate = [_Collector(reports)], False
    library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield reports
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        if bars:
            library.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
