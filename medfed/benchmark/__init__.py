"""The benchmark: suites, their plan and runner, the pilot and its advice."""
