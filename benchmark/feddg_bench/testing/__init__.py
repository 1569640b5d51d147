"""Test your own method or data set against the contract that the built-in ones keep."""

from feddg_bench.testing.contract import CONTRACT, Subject, contract_tests
from feddg_bench.testing.toy import (
    TaskRecorder,
    ToyRun,
    start_toy_run,
    toy_federation,
    toy_regression,
    toy_settings,
)

__all__ = [
    "CONTRACT",
    "Subject",
    "TaskRecorder",
    "ToyRun",
    "contract_tests",
    "start_toy_run",
    "toy_federation",
    "toy_regression",
    "toy_settings",
]
