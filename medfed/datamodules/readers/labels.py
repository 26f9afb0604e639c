"""Which label values make up which region: as a data set's index says, or as the user wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from medfed.common.errors import ConfigError, DataError
from medfed.datamodules.readers.base import check_names

Regions = dict[str, tuple[int, ...]]


def listed_labels(labels: object, path: Path) -> Regions:
    """Reads the entry ``labels`` of a ``dataset.json``.

    Args:
        labels: ``{"0": "background", "1": "liver"}`` (MSD), or ``{"background": 0, "liver": 1}`` or
            with several values, ``{"tumour": [1, 2]}`` (nnU-Net).
        path: The file, for sentences.

    Returns:
        The values of every region but the background, in order.

    Raises:
        DataError: If it is neither, or has nnU-Net's ``ignore``.

    Example:
        >>> listed_labels({"0": "background", "2": "tumour", "1": "liver"}, Path("dataset.json"))
        {'liver': (1,), 'tumour': (2,)}
        >>> listed_labels({"background": 0, "whole": [1, 2], "core": 2}, Path("dataset.json"))
        {'whole': (1, 2), 'core': (2,)}
    """
    found: Regions = {}
    try:
        assert isinstance(labels, Mapping)
        if all(str(key).isdigit() for key in labels):
            by_value = sorted((int(key), str(name)) for key, name in labels.items())
            found = {name: (value,) for value, name in by_value if value}
            assert len(found) == len([value for value, _ in by_value if value])
        else:
            for name, given in labels.items():
                values = tuple(given) if isinstance(given, list | tuple) else (given,)
                assert values
                assert all(type(v) is int and 0 <= v < 256 for v in values)
                if values != (0,):
                    found[str(name)] = values
        assert found
    except (AssertionError, TypeError, ValueError):
        raise DataError(
            f'{path} has no usable labels ({str(labels)[:80]}); write {{"0": "background", "1": '
            '"NAME", ...}, or set data.reader.regions={NAME: [1]}.'
        ) from None
    if "ignore" in found:
        raise DataError(
            f"{path} has the label ignore, which is not supported: its voxels would count as "
            "background; give them a value in the masks, and remove the label."
        )
    return found


def chosen_regions(
    wanted: Mapping[str, Sequence[int]] | Sequence[str] | None, listed: Regions
) -> Regions:
    """Takes the regions that a user wants.

    Args:
        wanted: Values by region; or names of those that are listed; or None for all of these.
        listed: From `listed_labels`.

    Raises:
        ConfigError: If a name is unknown, or a value no label.

    Example:
        >>> listed = {"liver": (1,), "tumour": (2,)}
        >>> chosen_regions(["tumour"], listed)
        {'tumour': (2,)}
        >>> chosen_regions({"whole": [1, 2], "tumour": [2]}, listed)
        {'whole': (1, 2), 'tumour': (2,)}
    """
    if wanted is None:
        return listed
    if not isinstance(wanted, Mapping):
        if isinstance(wanted, str):
            wanted = [wanted]
        return {name: listed[name] for name in check_names("region", wanted, list(listed))}
    found = {str(name): tuple(values) for name, values in wanted.items()}
    values = [value for each in found.values() for value in each]
    whole = all(type(v) is int and 0 < v < 256 for v in values)
    if not found or not all(found.values()) or not whole:
        raise ConfigError(
            f"data.reader.regions={dict(wanted)} must give each region its label values, such as "
            "{liver: [1, 2], tumour: [2]}, or name regions of the data set."
        )
    return found
