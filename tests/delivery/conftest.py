"""Hospitals are made once."""

from __future__ import annotations

import pytest

from tests.delivery.hospitals import Hospital, make_hospital


@pytest.fixture(scope="package")
def hospital(tmp_path_factory):
    """Makes a hospital by name, once."""
    made: dict[str, Hospital] = {}
    root = tmp_path_factory.mktemp("hospitals")

    def get(name: str) -> Hospital:
        if name not in made:
            made[name] = make_hospital(name, root)
        return made[name]

    return get
