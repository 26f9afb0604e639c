"""What readers, partitions and data modules begin with: names of ``extending import *``.

Each name keeps its documentation where it is defined. A reader of yours may import the few names
that it needs from here. ``Literal`` and what few need stay in each file, as linters look for them
there.
"""

# ruff: noqa: I001, RUF022 - in groups, by what they are for
from __future__ import annotations

# fmt: off
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar
import numpy as np
from numpy.typing import NDArray
from medfed.datamodules.readers.base import Missing, Names, Patient, Reader, VolumeReader
from medfed.datamodules.readers.base import are_exclusive, check_names, given_path, with_hospitals
from medfed.datamodules.readers.persons import persons_of, search_name
from medfed.datamodules.splits import SPLITS, Split
from medfed.common.schemas import parse_json
from medfed.common.seeding import derive_seed, numpy_rng, torch_rng
from medfed.standalone.checks import check_count, check_known, check_not_negative, checked, within
from medfed.standalone.checks import check_fields, check_optional_count, check_positive
from medfed.standalone.csv_files import Sheet, as_number, csv_rows, listed_columns
from medfed.standalone.errors import ConfigError, DataError, did_you_mean, few
from medfed.standalone.files import is_visible, slashed, visible_files
from medfed.standalone.names import fold, same
from medfed.standalone.volume_files import is_volume, stem_of, suffix_of
from medfed.standalone.volumes import read_geometry

__all__ = [
    # of Python and NumPy
    "Annotated", "Any", "Callable", "ClassVar", "Collection", "Counter", "Iterable", "Iterator",
    "KW_ONLY", "Mapping", "NDArray", "Path", "Sequence", "asdict", "cached_property", "dataclass",
    "field", "fields", "logging", "np", "partial", "re", "replace",
    # patients, their names and splits
    "Missing", "Names", "Patient", "Reader", "SPLITS", "Split", "VolumeReader", "are_exclusive",
    "check_names", "fold", "given_path", "persons_of", "same", "search_name", "with_hospitals",
    # files: tables, lists, volumes
    "Sheet", "as_number", "csv_rows", "is_visible", "is_volume", "listed_columns", "parse_json",
    "read_geometry", "slashed", "stem_of", "suffix_of", "visible_files",
    # randomness that follows from the seed
    "derive_seed", "numpy_rng", "torch_rng",
    # errors, and checks of arguments
    "ConfigError", "DataError", "check_count", "check_fields", "check_known", "check_not_negative",
    "check_optional_count", "check_positive", "checked", "did_you_mean", "few", "within",
]
# fmt: on
