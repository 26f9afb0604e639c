"""Lung nodule classification: CT patches at candidates, mapped from a cache on disk."""

from __future__ import annotations

from typing import TypeVar

import torch

from medfed.datamodules.cache.store import Item, Recipe, Store
from medfed.datamodules.cache.volumes import CachedDataModule
from medfed.datamodules.client_data import Block, ClientData
from medfed.datamodules.duplicates import Sample, content
from medfed.datamodules.extending import *
from medfed.datamodules.plans import ClientPlan, client_images
from medfed.datamodules.readers.luna16 import Luna16Reader
from medfed.datamodules.readers.samples import Index, select_rows
from medfed.standalone.ct import Candidates, PatchSpec, read_patches, to_unit
from medfed.standalone.files import digest

log = logging.getLogger(__name__)


AnyScans = TypeVar("AnyScans", bound=Luna16Reader)


class CtDataModule(CachedDataModule[AnyScans]):
    """Base of the data modules of scans in LUNA16's layout, which are read once into a cache."""

    def prepare_data(self) -> None:
        """Generates the cohort if no path is given and it does not exist yet."""
        self.channel_names, self.class_names = self.scans.channels, self.scans.classes

    def recipe_of(
        self, kind: str, name: str, read: Any, points: Callable[[str], Candidates], joined: bool
    ) -> Recipe:
        """Returns a recipe with an item per scan."""
        spec, items = getattr(self, name), []
        for scan in self.list_patients():
            header = scan.files["header"]
            hashed = (header,) if "raw" in scan.files else ()
            args = (header, points(scan.id), spec)
            items.append(Item(scan.id, tuple(scan.files.values()), hashed, args))
        settings = {"reader": self.scans.record(), name: asdict(spec)}
        where = "" if self.path is None else f" data.path={self.path}"
        again = f"medfed prepare data={kind}{where}"
        return Recipe(kind, settings, tuple(items), read, joined=joined, command=again)

    def ready(self, what: str) -> Store:
        """Returns the cache; makes it first if it is missing."""
        if (store := self.find_cache()) is None:
            store = self.build_cache()
            log.info("Prepared the %s once for all runs, in %s.", what, store.folder)
        return store

    def file_hashes(self, patients: Sequence[str]) -> dict[str, str]:
        """SHA-256 of the CSV and headers; the cache's checksums in place of 120 GB of voxels."""
        assert self.store is not None
        record = self.scans.record()
        hashes = {str(self.scans.path / record["candidates"]): str(record["sha256"])}
        for patient in patients:
            hashes |= self.store.hashes(patient)
        return dict(sorted(hashes.items()))


@dataclass(eq=False, repr=False)
class Luna16DataModule(CtDataModule[Luna16Reader]):
    """Patches at nodule candidates: ``image`` (B, C, h, w[, d]) in [-1, 1], ``label`` (B,) int64.

    The patches of all kept candidates are extracted once into a cache; a client is a set of its
    rows. A scan counts as a patient. If a partition sets a client's share of nodules, all its
    splits are thinned to it.
    """

    # The patch to cut at a candidate, of two or three dimensions. The cache depends on it, but not
    # on the run's seed.
    patches: PatchSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counts: dict[str, dict[str, Any]] = {}

    @property
    def spatial_dims(self) -> int:
        """2 for slices (one, or several as channels), 3 for cubes."""
        return len(self.patches.size)

    def prepare_data(self) -> None:
        """See the base class; slices may be channels."""
        super().prepare_data()
        self.channel_names = self.patches.channels(self.scans.channels[0])

    def recipe(self) -> Recipe:
        """The cache's recipe: one item per scan, with all its kept candidates."""
        candidates = self.scans.candidates_of
        return self.recipe_of("luna16", "patches", read_patches, candidates, joined=True)

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Maps every client's rows of the cache; makes the cache first if it is missing."""
        store = self.ready("patches")
        labels = np.array(store.array("label"))
        return {name: self._client(name, plan, store, labels) for name, plan in plans.items()}

    def _client(self, name: str, plan: ClientPlan, store: Store, labels: Index) -> ClientData:
        blocks: dict[Split, Block] = {}
        unit = partial(to_unit, window=self.patches.window)
        ranges = [[store.rows(series) for series in plan.patients[split]] for split in SPLITS]
        every, images = store.array("row"), store.path("image")
        seeds = [derive_seed(self.seed, "thin", name, split) for split in SPLITS]
        draws = zip(ranges, seeds, strict=True)
        chosen = [select_rows(of, labels, plan.shares, seed) for of, seed in draws]
        for split, (rows, case) in zip(SPLITS, chosen, strict=True):
            series, numbers = [plan.patients[split][i] for i in case], every[rows]
            keys = zip(series, numbers.tolist(), strict=True)
            blocks[split] = {
                "image": client_images(plan, images, rows, unit, keys),
                "label": torch.from_numpy(labels[rows]),
                "case": torch.from_numpy(case),
            }
            self._counts.setdefault(name, {})[split] = {
                "counts": np.bincount(labels[rows], minlength=self.num_classes).tolist(),
                "rows_sha256": digest(numbers.tolist()),
            }
            if plan.patients[split] and not len(rows):
                if split == "train":
                    mend = "give it more scans, or class shares that need fewer nodules"
                    raise DataError(f"Client {name} has no training patch; {mend}.")
                log.warning("Client %s has no %s patch after thinning.", name, split)
        return self.labelled_client(name, plan, blocks)

    def data_remarks(self) -> list[str]:
        """See the base class: the selection of non-nodules."""
        record = self.scans.record()
        listed, used = (sum(record[key].values()) for key in ("listed", "kept"))
        if listed == used:
            return []
        key = f"data.reader.negatives_per_positive={record['negatives_per_positive']}"
        what = f"of the scans that are there all nodules, and {key} others for each"
        return [f"Of {listed:,} candidates {used:,} are used: {what}."]

    def contents(self) -> tuple[str, list[Sample]]:
        """See the base class: patches, in HU."""
        assert self.store is not None
        images, labels = self.store.array("image"), self.store.array("label")
        used = [series for plan in self.plans.values() for series in plan.every]
        ranges = [self.store.rows(series) for series in used]
        return "patches", [
            Sample(series, f"candidate {n - rows.start} of {series}", key, int(labels[n]))
            for series, rows in zip(used, ranges, strict=True)
            for n in rows
            if (key := content(images[n])) is not None
        ]

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: patches at candidates on the patient grid, HU windowed to [-1, 1]."""
        spec = asdict(self.patches)
        spec = {k: list(v) if isinstance(v, tuple) else v for k, v in spec.items()}
        return {
            **super().preprocessing(client),
            "orientation": "LPS",
            "normalization": {"name": "window", "hu": list(self.patches.window), "to": [-1, 1]},
            "input": {"kind": "ct_patches", "patches": spec},
        }

    def positive_of(self, client: str) -> int | None:
        """The class of nodules: 1, or its number in the client's order of classes."""
        order = self.plans[client].label_order
        return 1 if order is None else order[1]

    def test_remarks(self) -> list[str]:
        """Remarks that fewer candidates give fewer false positives per scan."""
        record = self.scans.record()
        used, listed = (record[key]["non-nodule"] for key in ("kept", "listed"))
        if used == listed and all(plan.shares is None for plan in self.plans.values()):
            return []
        thinned = "" if used < listed else ", thinned to the shares of the partition"
        what = f"the kept candidates ({used} of {listed} non-nodules{thinned}), not all that LUNA16"
        why = "with fewer false positives per scan it is higher"
        mend = "data.reader.negatives_per_positive=null keeps all"
        return [f"cpm counts only {what} lists: {why}; {mend}."]

    def settings(self) -> dict[str, Any]:
        """How candidates were chosen, patches cut, and which ones each client and split kept."""
        cut = {"patches": asdict(self.patches), "candidates": self._counts}
        return {"reader": self.scans.record(), **cut}
