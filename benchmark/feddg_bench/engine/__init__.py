"""Execution of client work: workers, executors and devices."""
