"""``python -m feddg_bench`` is the ``feddg-bench`` command."""

from feddg_bench.cli import main

if __name__ == "__main__":
    main()
