"""A cache on disk for what is slow to read: built once, in parallel, whole or not used at all.

A data module describes what it needs as a `Recipe`, opens it by `ensure` (which makes it where it
is missing) and serves samples by `medfed.datamodules.cache.rows.MappedRows`; that module needs
PyTorch, which worker processes should not have to import.
"""

from medfed.datamodules.cache.building import Cached, build, ensure
from medfed.datamodules.cache.recipe import Item, Recipe
from medfed.datamodules.cache.store import Store, find

__all__ = ["Cached", "Item", "Recipe", "Store", "build", "ensure", "find"]
