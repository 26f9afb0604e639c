"""The benchmark: suites of tasks, cells that are run once, tuning, processes that stay alive."""
