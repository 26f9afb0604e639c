"""The benchmark: suites, their plan and runner, the pilot, and the advice that rests on it."""
