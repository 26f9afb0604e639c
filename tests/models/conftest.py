"""A test with an argument ``kind`` runs once per task."""

from __future__ import annotations

import pytest

from tests.models.tiny import KINDS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param
