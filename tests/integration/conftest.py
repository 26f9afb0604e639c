"""One small cohort for all integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cohort_root(tmp_path_factory) -> Path:
    """Where the small cohorts are generated, once each."""
    return tmp_path_factory.mktemp("cohorts")
