"""A bundle's pages: ``docs/README.md`` says how to run it, ``docs/model_card.md`` what is recorded.

Every line comes from the metadata, by the templates of this folder. Where nothing was recorded, the
page says so. What runs the bundle under MONAI is ``configs/inference.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medfed.common.console import in_markdown
from medfed.common.templates import text_templates
from medfed.delivery.bundle.metadata import further
from medfed.delivery.bundle.scripts.masks import map_codes
from medfed.delivery.bundle.source_code import short_hash

_TEMPLATES = Path(__file__).parent / "templates"
README, CARD = "docs/README.md", "docs/model_card.md"


def page(name: str, facts: Mapping[str, Any]) -> str:
    """Writes a page for people.

    Args:
        name: ``docs/README.md``, or ``docs/model_card.md``.
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.bundle.metadata`.

    Returns:
        Markdown.
    """
    environment = text_templates(_TEMPLATES)
    environment.filters |= {
        "bytes": "{:,}".format,
        "interval": _interval,
        "number": _number,
        "numbers": _numbers,
        "short_hash": short_hash,
    }
    facts = in_markdown(facts)
    source = facts["input"]
    return environment.get_template(name.removeprefix("docs/")).render(
        facts=facts,
        source=source,
        sizes=facts["sizes"],
        card=facts.get("card") or {},
        code=facts.get("code"),
        files=source.get("files"),
        bits=sorted(set(facts["bits"].values())),
        absent=[n for n in facts["channels"] if n not in facts["present"]],
        inputs="Features" if source["kind"] == "table" else "Channels",
        outputs=outputs(facts),
        packages=["monai", "nibabel", "pillow", "fire", *sorted(further(facts))],
        ranges=list(_ranges(source)),
        versions={n: v for n, v in facts["versions"].items() if isinstance(v, str)},
    )


def outputs(facts: Mapping[str, Any]) -> str:
    """What the results hold: names, of a label map with their values."""
    if facts.get("activation") != "softmax":
        return ", ".join(facts["labels"])
    codes = map_codes(facts) or {}
    return "a label map: 0 background, " + ", ".join(f"{v} {name}" for name, v in codes.items())


def _ranges(source: Mapping[str, Any]) -> Iterator[str]:
    """The values of a table's columns that training has seen."""
    numeric = [n for n in source.get("features", ()) if n not in (source.get("categories") or {})]
    ends = zip(numeric, source.get("lowest") or (), source.get("highest") or (), strict=False)
    yield from (f"{n} {low:g} to {high:g}" for n, low, high in ends if low is not None)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _numbers(lengths: Sequence[float], between: str = " × ") -> str:
    return between.join(f"{mm:.3g}" for mm in lengths)


def _interval(ends: Sequence[float | None] | None) -> str:
    if not ends or any(end is None for end in ends):
        return "not known"
    return f"{ends[0]:.4f} to {ends[1]:.4f}"


def inference_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the configuration that ``python -m monai.bundle run`` runs.

    Args:
        facts: The part ``medfed`` of the metadata, see :mod:`medfed.delivery.bundle.metadata`.

    Returns:
        ``configs/inference.json``, as JSON has it.
    """
    config: dict[str, Any] = json.loads((_TEMPLATES / "inference.json").read_text(encoding="utf-8"))
    if facts["input"]["kind"] == "ct_patches":
        config["candidates"] = "$@dataset_dir + '/candidates.csv'"
    return config | {"network_def": facts["network"]}
