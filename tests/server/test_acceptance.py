"""Acceptance by day: what the history keeps, a planted drop, and where it is shown."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli.app import app
from foretoken.errors import ConfigError, GateError, StorageError
from foretoken.measure.sequential import drop_evidence
from foretoken.model.names import model_folder
from foretoken.server.observe.acceptance import (
    MAX_ROWS,
    MAX_SERIES,
    OTHER,
    AcceptanceDay,
    SeriesName,
    acceptance_report,
    add_to_days,
    day_of,
    delete_old_days,
    judge_days,
    series_of,
)
from foretoken.server.observe.figures import added_places, figures_of
from foretoken.server.observe.history import History, acceptance_series, connect
from tests.server.records import drafted, record, stats_of

DAY_S = 86_400.0
MIB = 1 << 20
NOW_S = 1_800_000_000.0


def served(connection: sqlite3.Connection, day: float, rate: float, **changes: Any) -> None:
    """A day on which so many of 1000 tokens at each of two places were accepted."""
    found = figures_of(record(began_unix_s=NOW_S + day * DAY_S, **changes))
    accepted = int(1000 * rate)
    add_to_days(connection, [type(found)(**vars(found) | {"places": ((1000, accepted), (1000, accepted // 2))})])


def days_of(rates: list[float]) -> list[AcceptanceDay]:
    name = SeriesName("m", "ngram", "")
    return [AcceptanceDay(f"2026-01-{n:03}", name, 9, ((1000, int(1000 * rate)),)) for n, rate in enumerate(rates)]


def test_days_are_the_sums_of_their_requests(tmp_path: Path) -> None:
    path, now = tmp_path / "history.db", time.time()
    kept = History(path, 90.0, 64 * MIB)
    for _ in range(3):
        kept.finished(record(began_unix_s=now - DAY_S, stats=(stats_of(drafted(4, 3)), stats_of(drafted(2, 0)))))
    kept.finished(record(began_unix_s=now))  # today is not judged
    kept.finished(record(began_unix_s=now - DAY_S, drafter="", stats=(stats_of(),)))
    kept.close()
    (one,) = acceptance_series(path)
    assert one.name == ("reference", "ngram", "")
    (day,) = one.days
    assert (day.num_requests, day.places) == (3, ((6, 3), (6, 3), (3, 3), (3, 0)))
    assert day.rate == 9 / 18
    assert day.share(0) is None  # of six tokens
    assert History(path, 90.0, 64 * MIB).series == (one,)


def test_places_add_up_and_are_bounded() -> None:
    assert added_places() == ()
    assert added_places([(5, 2)], [(3, 1), (2, 0)]) == ((8, 3), (2, 0))
    assert len(added_places([(1, 1)] * 99)) == 16


def test_a_history_of_the_version_before_gets_the_table(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with closing(connect(path, 1.0)) as connection:
        connection.executescript("DROP TABLE acceptance; PRAGMA user_version = 1")
    with closing(connect(path, 1.0)) as connection:
        assert series_of(connection, "2100-01-01") == ()


@pytest.mark.parametrize(
    "places",
    [
        "",
        "3",
        "[3]",
        "[[1]]",
        '[["a", 1]]',
        "[[null, 1]]",
        "[[1e400, 1]]",
        b"\xff",
        "[[4, 5]]",
        "[[4, -1]]",
        "[" * 9999,
    ],
)
def test_places_that_are_none_cost_the_server_nothing_and_are_refused_by_the_file(
    tmp_path: Path, places: str | bytes
) -> None:
    path = tmp_path / "history.db"
    with closing(connect(path, 1.0)) as connection:
        served(connection, 0, 0.5)
        connection.execute("UPDATE acceptance SET day = '2026-01-01', places = ?", (places,))
    with pytest.raises(StorageError, match=r"^history: cannot read .*history\.db: .*acceptance.*; take a backup"):
        acceptance_series(path)
    kept = History(path, 90.0, 64 * MIB)
    kept.finished(record(began_unix_s=time.time()))
    kept.close()
    assert kept.series == ()
    assert kept.num_dropped == 0
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM requests").fetchone()[0] == 1


def test_a_history_without_the_table_is_refused_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with closing(connect(path, 1.0)) as connection:
        connection.execute("DROP TABLE acceptance")
    with pytest.raises(StorageError, match=r"^history: cannot read .*history\.db: no such table"):
        acceptance_series(path)


def test_rows_are_bounded(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "history.db", 1.0)) as connection:
        for number in range(MAX_SERIES + 9):
            served(connection, 0, 0.5, slice=f"s{number}")
        found = {one.name.slice: one for one in series_of(connection, "2100-01-01")}
        assert len(found) == MAX_SERIES + 1
        assert found[OTHER].days[0].num_requests == 9
        rows = [(day_of(day * DAY_S), "m", "d", "s", 1, "[]") for day in range(MAX_ROWS + 50)]
        connection.executemany("INSERT INTO acceptance VALUES (?, ?, ?, ?, ?, ?)", rows)
        delete_old_days(connection)
        assert connection.execute("SELECT count(*) FROM acceptance").fetchone()[0] <= MAX_ROWS
        assert OTHER in {one.name.slice for one in series_of(connection, "2100-01-01")}  # the newest days stay


def test_a_drop_is_found_with_where_to_look(tmp_path: Path) -> None:
    rng = random.Random(0)
    with closing(connect(tmp_path / "history.db", 1.0)) as connection:
        for day in range(40):
            for drafter, slice_ in (("ngram", "code"), ("ngram", "chat"), ("eagle", "code")):
                fell = 0.15 if day >= 32 and (drafter, slice_) == ("eagle", "code") else 0.0
                served(connection, day, 0.7 + rng.gauss(0, 0.02) - fell, drafter=drafter, slice=slice_)
        found = series_of(connection, day_of(NOW_S + 40 * DAY_S))
    fallen = [one for one in found if one.has_fallen]
    assert [one.name[1:] for one in fallen] == [("eagle", "code")]
    assert day_of(NOW_S + 33 * DAY_S) < fallen[0].fell_on <= day_of(NOW_S + 39 * DAY_S)
    assert fallen[0].place == 1
    assert fallen[0].before is not None
    assert fallen[0].after is not None
    assert fallen[0].before - fallen[0].after == pytest.approx(0.15, abs=0.03)
    report = acceptance_report(found, {}, "foretoken acceptance", None)
    assert report.verdict == "Acceptance fell: eagle on code."
    assert not report.passed
    assert report.conclusions == (
        "eagle on code fell: other drafters did not fall on these requests: look at eagle itself "
        "(`foretoken diagnose`).",
    )
    assert report.plots[0].title.endswith("eagle on code")


def test_no_single_day_and_no_rise_raises_an_alarm() -> None:
    rng = random.Random(1)
    usual = [0.7 + rng.gauss(0, 0.01) for _ in range(40)]
    assert not judge_days(days_of([*usual, 0.0]), 20.0).fell_on
    assert not judge_days(days_of([*usual, *[0.9] * 20]), 20.0).fell_on
    fell = [*usual, *[0.55 + rng.gauss(0, 0.01) for _ in range(7)]]
    assert judge_days(days_of(fell), 20.0).has_fallen
    recovered = judge_days(days_of([*fell, *usual, *usual]), 20.0)
    assert recovered.fell_on
    assert not recovered.has_fallen


def test_what_days_are_equal_or_few_says_nothing() -> None:
    assert drop_evidence([]).shape == (0,)
    assert drop_evidence([0.5] * 7) == pytest.approx([1.0] * 7)
    assert drop_evidence([0.7] * 50).max() <= 1.0


def _ask(path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["acceptance", str(path), "--json", *words])


def _serve(path: Path, before: int, after: int) -> Path:
    """A history of so many days at a rate of 0.7, then at 0.4; the last one 40 days at most after the first."""
    rng, today = random.Random(2), time.time()
    with closing(connect(path, 1.0)) as connection:
        for day in range(before + after):
            rate = 0.7 if day < before else 0.4
            served(connection, (today - NOW_S) / DAY_S - 40 + day, rate + rng.gauss(0, 0.02))
    return path


def test_the_verb_ends_with_its_exit_code(tmp_path: Path) -> None:
    kept = _ask(_serve(tmp_path / "kept.db", 30, 0))
    assert kept.exit_code == 0
    assert json.loads(kept.stdout)["rows"][0]["has_fallen"] is False
    fell = _ask(_serve(tmp_path / "fell.db", 30, 10))
    assert isinstance(fell.exception, GateError)
    (row,) = json.loads(fell.stdout)["rows"]
    assert row["has_fallen"]
    assert row["cause"].startswith("nothing to compare it with")


def _head_with_another_rope(folder: Path) -> Path:
    shutil.copytree(model_folder("reference:eagle"), folder)
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw |= {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    file.write_text(json.dumps(raw))
    return folder


def test_the_cause_is_looked_for_where_it_has_fallen(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "why.json"
    texts = ("The water in the glass", "def add(a, b):", "import os", "class Point:", "for i in range", "return self")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    head = _head_with_another_rope(tmp_path / "head")
    pair = ("--target", "reference:target", "--head", str(head), "--prompts", str(prompts), "--out", str(out))
    fell = _ask(_serve(tmp_path / "fell.db", 30, 10), *pair)
    assert isinstance(fell.exception, GateError)
    found = json.loads(fell.stdout)
    assert found["rows"][0]["has_fallen"]
    assert found["diagnosis"]["cause"] == "rope base"
    assert json.loads(out.read_text())["diagnosis"]["cause"] == "rope base"
    kept = _ask(_serve(tmp_path / "kept.db", 30, 0), *pair)
    assert kept.exit_code == 0
    assert json.loads(kept.stdout)["diagnosis"] is None


def test_a_head_without_its_target_is_refused(tmp_path: Path) -> None:
    path = _serve(tmp_path / "kept.db", 30, 0)
    for words, field in ((("--head", "reference:eagle"), "target"), (("--target", "reference:target"), "head")):
        refused = _ask(path, *words)
        assert isinstance(refused.exception, ConfigError)
        assert refused.exception.field == field
