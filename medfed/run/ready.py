"""Loads what runs need, once, in the server whose forks are the processes of a pool."""

from __future__ import annotations

from medfed.common.processes import loading

with loading():
    import medfed.run.cell  # noqa: F401
