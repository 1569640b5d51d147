"""End-to-end tests of protected runs: records, tables, resume, and refused settings."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from feddg_bench.common.errors import SettingsError
from feddg_bench.protection.accounting import check_accountant, epsilon
from feddg_bench.records.record import RunRecord
from feddg_bench.records.store import ResultsStore
from tests.helpers import ended, refused, start, wait_until

pytest.importorskip("opacus", reason="epsilon needs the extra feddg-bench[privacy]")

Run = Callable[..., Any]
TINY = (
    *("--scenario", "ip-o-c", "--clients", "6", "--per-round", "3", "--rounds", "2"),
    "data.image_size=8",
)
DP = ("privacy.mechanism=dp_client", "federation.weighting=uniform", "privacy.noise_multiplier=0.5")
SECURE = ("privacy.aggregation=secure",)


def only(results: Path) -> RunRecord:
    (record,) = ResultsStore(results)
    return record


def test_epsilon_stands_in_the_record_and_under_the_tables(feddg: Run, tmp_path: Path) -> None:
    done = feddg("run", "--method", "fedavg", *TINY, "--workers", "1", *DP)
    assert done.code == 0, done.err
    record = only(tmp_path / "runs")
    assert record.privacy is not None
    assert record.privacy.epsilon == epsilon(0.5, 0.5, 2, 1e-5)
    assert (record.privacy.mechanism, record.privacy.sampling) == ("dp_client", "poisson")
    said = f"epsilon {record.privacy.words().split()[1]} at delta 1e-05"
    assert said in " ".join(done.out.split())
    plain = feddg("run", "--method", "fedavg", *TINY, "--workers", "1")
    assert plain.code == 0, plain.err
    assert "epsilon" not in plain.out
    made = feddg("tables", "all", "--results", "runs", "--out", "tables", "--variants")
    assert made.code == 0, made.err
    for ending in ("notes.md", "tex"):
        text = (tmp_path / "tables" / f"digits4-ltdo-quick-variants.{ending}").read_text()
        assert said in " ".join(text.split())
        assert "a client, there or not" in " ".join(text.split())


def test_secure_sums_have_the_numbers_of_plain_ones_and_say_what_they_cost(
    feddg: Run, tmp_path: Path
) -> None:
    runs = {}
    for name, words in (("plain", ()), ("secure", SECURE)):
        done = feddg(
            "run",
            "--method",
            "fedgma",
            *TINY,
            "--workers",
            "1",
            *words,
            "--results",
            name,
            "--json",
        )
        assert done.code == 0, done.err
        runs[name] = only(tmp_path / name)
    plain, secure = runs["plain"], runs["secure"]
    assert plain.key != secure.key
    for a, b in zip(plain.rounds, secure.rounds, strict=True):
        assert a.train["loss"] == pytest.approx(b.train["loss"], abs=1e-5)
        assert a.protection is None
        assert b.protection is not None
        # Numbers of 8 instead of 4 bytes, and as many signs; then keys and shares.
        assert 4 * a.bytes.up < b.protection.up == b.bytes.up < 4.02 * a.bytes.up
        assert b.bytes.down == a.bytes.down + b.protection.down
        assert b.seconds["protection"] > 0
    assert "privacy" not in plain.as_json()
    assert secure.as_json()["privacy"] == {"mechanism": "none", "aggregation": "secure"}


def test_noised_styles(feddg: Run, tmp_path: Path) -> None:
    done = feddg("run", "--method", "pardon", *TINY, "--workers", "1", "privacy.mechanism=dp_style")
    assert done.code == 0, done.err
    record = only(tmp_path / "runs")
    assert record.privacy is not None
    assert record.privacy.epsilon == epsilon(0.5, 1, 1, 1e-5)
    assert "sent once (style)" in " ".join(done.out.split())


def test_without_the_extra_one_sentence_says_what_to_install() -> None:
    with refused(SettingsError, "privacy.mechanism=dp_client", "pip install", "privacy]"):
        check_accountant("no_such_package", "privacy.mechanism=dp_client")


def test_too_few_clients_for_a_sum_before_the_first_round_are_said(
    feddg: Run, tmp_path: Path
) -> None:
    words = [*SECURE, "privacy.dropout=0.9"]
    done = feddg("run", "--method", "scaffold", *TINY, *words, "--results", tmp_path)
    assert done.code == 2
    assert "clients are left" in done.err.splitlines()[-1]
    assert "privacy.dropout" in done.err.splitlines()[-1]


@pytest.mark.nightly
def test_an_interrupted_run_ends_with_the_same_record(feddg: Run, tmp_path: Path) -> None:
    words = [*DP, *SECURE, "privacy.dropout=0.1", "privacy.sampling=fixed"]
    command = ["run", "--method", "fedavg", *TINY, *words, "--rounds", "12", "--workers"]
    whole, parts, log = tmp_path / "whole", tmp_path / "parts", tmp_path / "log"
    assert feddg(*command, "1", "--results", whole).code == 0
    process = start([*command, "1", "--results", parts], log)
    wait_until(lambda: list(parts.glob("checkpoints/*.safetensors")), process, log)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process) == 130, log.read_text()
    done = feddg(*command, "2", "--results", parts)
    assert done.code == 0
    assert "resuming after round" in done.err, done.err
    assert json.dumps(only(parts).numbers()) == json.dumps(only(whole).numbers())
