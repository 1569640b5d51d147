"""Test your own method or data set against the contract that the built-in ones keep."""

from feddg_bench.testing.contract import CONTRACT, Checked, Subject, check_contract, contract_tests
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
    "Checked",
    "Subject",
    "TaskRecorder",
    "ToyRun",
    "check_contract",
    "contract_tests",
    "start_toy_run",
    "toy_federation",
    "toy_regression",
    "toy_settings",
]
