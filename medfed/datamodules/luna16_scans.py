"""Lung nodule detection: whole CT scans, mapped from a cache on disk, with boxes of nodules."""

from __future__ import annotations

from itertools import groupby

import torch

from medfed.datamodules.augmentation import Augmentation
from medfed.datamodules.cache.store import Recipe, Store
from medfed.datamodules.client_data import Block, BlocksOnDemand, ClientData
from medfed.datamodules.duplicates import Sample
from medfed.datamodules.extending import *
from medfed.datamodules.luna16 import CtDataModule
from medfed.datamodules.patches import BoxedVolume, PatchRows
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.luna16 import Luna16ScanReader, read_with_nodules
from medfed.functional.detection import SCAN
from medfed.standalone.ct import ScanSpec, world_of

log = logging.getLogger(__name__)
Boxes = NDArray[np.float32]
Ints = NDArray[np.int64]
_INWARDS = 0.15  # share of a patch's side that nodules keep from its ends, where there is room


@dataclass(eq=False, repr=False)
class Luna16ScansDataModule(CtDataModule[Luna16ScanReader]):
    """Scans at one spacing: ``image`` (B, 1, h, w, d) in [0, 1], ``label`` (B, M, 7) float32.

    A row of the label has the corners of the cube around a nodule in voxels, and a flag: 1; -1 if
    its centre lies outside the patch; 0 for an empty row. Patches are cut anew for every epoch;
    evaluation takes whole scans, each of which counts as a patient.
    """

    _: KW_ONLY
    scan: ScanSpec  # how scans are prepared. The cache depends on it, but not on the run's seed.
    patch_size: Sequence[int] = (48, 48, 24)  # (h, w, d)
    # Patches from every training scan, in every epoch.
    patches_per_patient: Annotated[int, check_count] = 8
    # Share of the patches that are drawn anywhere; the others hold a nodule.
    background_share: Annotated[float, within("[0, 1]")] = 0.25
    batch_size: int = 8
    eval_batch_size: int = 1  # scans per evaluation batch: 1, as their sizes differ

    spatial_dims = 3
    boxes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.patch_size) != 3 or any(n < 8 or n % 8 for n in self.patch_size):
            raise ConfigError(f"data.patch_size={[*self.patch_size]} must be three multiples of 8.")
        h, w, d = self.patch_size
        self.size = h, w, d
        self._turns = False
        if isinstance(self.augment, Augmentation):
            self._turns = self.augment.affine_chance > 0 or self.augment.quarter_chance > 0
            self.augment = replace(self.augment, affine_chance=0.0, quarter_chance=0.0)
        elif self.augment is not None:
            why = "a transform of your own would not move the boxes with the image"
            raise ConfigError(f"data.augment must be a recipe such as augment=light: {why}.")

    @property
    def window(self) -> tuple[int, ...]:
        """The default size of the window that a network evaluates at once."""
        return self.size

    def recipe(self) -> Recipe:
        """The cache's recipe: every scan with its nodules."""
        nodules = self.scans.nodules_of
        return self.recipe_of("luna16_scans", "scan", read_with_nodules, nodules, joined=False)

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Maps every client's scans from the cache; makes the cache first if it is missing."""
        for name, plan in plans.items():
            if any(of is not None for of in (plan.scanner, plan.shares, plan.label_order)):
                what = f"The partition changes the scans or the labels of client {name}"
                mend = "choose partition=auto, centre or round_robin"
                raise ConfigError(f"{what}, which detection cannot; {mend}.")
        store = self.ready("scans")
        return {name: self._client(name, plan, store) for name, plan in plans.items()}

    def _client(self, name: str, plan: ClientPlan, store: Store) -> ClientData:
        if not plan.patients["train"]:
            raise DataError(f"Client {name} has no training scan; give it more scans.")
        arrays = [store.arrays(series) for series in plan.patients["train"]]
        volumes = [self._volume(of["image"]) for of in arrays]
        boxes = [np.array(of["boxes"]) for of in arrays]
        count, share = self.patches_per_patient, self.background_share
        fresh = ScanPatches(volumes, boxes, count, share, self.size)
        nodules = sum(map(len, boxes))
        if not nodules:
            log.warning("Client %s trains without a nodule: alone it learns to find none.", name)
        read = partial(self._whole, store)
        evaluation = {s: BlocksOnDemand(plan.patients[s], read) for s in SPLITS[1:]}
        train = fresh.block(derive_seed(self.seed, "patches", name))
        counts = torch.tensor([float(nodules)])
        made = {"train": train, "evaluation": evaluation, "label_counts": counts, "fresh": fresh}
        return self.client_of(name, plan, **made)

    def _volume(self, codes: NDArray[np.uint16]) -> BoxedVolume:
        empty = np.zeros((0, *codes.shape), np.uint8)
        return BoxedVolume(codes[None], self.scan.values[None], empty, (0, 0, 0), codes.shape, ())

    def _whole(self, store: Store, series: str, case: int) -> Block:
        """One scan: ``image`` (1, 1, h, w, d), ``label`` (1, M, 7), ``case``, ``spacing``."""
        arrays = store.arrays(series)
        boxes = np.array(arrays["boxes"])
        image = self.scan.values.take(arrays["image"])[None, None]
        return {
            "image": torch.from_numpy(image),
            "label": torch.from_numpy(_flagged(boxes, np.ones(len(boxes)), len(boxes)))[None],
            "case": torch.tensor([case]),
            "spacing": torch.tensor([self.scan.spacing], dtype=torch.float32),
        }

    def data_remarks(self) -> list[str]:
        """See the base class: what augmentation leaves out."""
        remark = "Boxes can be flipped, but not turned: of augment, flips and grey values are used."
        return [remark] if self._turns else []

    def contents(self) -> tuple[str, list[Sample]]:
        """See the base class: scans with their nodules."""
        assert self.store is not None
        used = (i for plan in self.plans.values() for i in plan.every)
        return "scans", [Sample(i, i, self.store.entry(i).checksum) for i in used]

    def found_places(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """See the base class: a row per box in LUNA16's columns, mm x y z of its centre."""
        placed = []
        for series, boxes in groupby(rows, key=lambda row: str(row["patient"])):
            grid = read_geometry(self.patients[series].files["header"], "LPS")
            lesions = [row for row in boxes if row["found"] != SCAN]
            places = np.array([[float(row[n]) for n in "xyz"] for row in lesions]).reshape(-1, 3)
            world = world_of(grid, places, self.scan.spacing).round(4).tolist()
            for row, (x, y, z) in zip(lesions, world, strict=True):
                place = {"seriesuid": series, "coordX": x, "coordY": y, "coordZ": z}
                placed.append({**place, "probability": row["score"]})
        return placed

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: scans on the patient grid, HU windowed to [0, 1]."""
        return {
            **super().preprocessing(client),
            "orientation": "LPS",
            "normalization": {"name": "window", "hu": list(self.scan.window), "to": [0, 1]},
            "input": {"kind": "ct_scans", "spacing": list(self.scan.spacing)},
        }

    def settings(self) -> dict[str, Any]:
        """How scans were prepared and patches cut."""
        return {
            "reader": self.scans.record(),
            "scan": asdict(self.scan),
            "patch_size": list(self.size),
            "patches_per_patient": self.patches_per_patient,
            "background_share": self.background_share,
        }


@dataclass(frozen=True)
class ScanPatches:
    """Draws a client's patches."""

    volumes: Sequence[BoxedVolume]  # of every training scan
    boxes: Sequence[Boxes]  # (m, 6) of each scan's nodules
    count: int  # patches per scan and epoch
    # Share of the patches that are drawn anywhere; all of a scan without a nodule.
    background_share: float
    size: tuple[int, int, int]  # (h, w, d)

    def block(self, seed: int) -> Block:
        """Draws the patches of one epoch, scan by scan."""
        rng, size = numpy_rng(seed, "patches"), np.array(self.size)
        most = max(1, *map(len, self.boxes)) if self.boxes else 1
        at, labels = [], []
        for number, (volume, boxes) in enumerate(zip(self.volumes, self.boxes, strict=True)):
            room = np.maximum(np.array(volume.shape) - size, 0)
            aside = round(self.count * self.background_share) if len(boxes) else self.count
            # As many draws for every patch, wherever it lies.
            places, inside = rng.random((self.count, 3)), rng.random((self.count, 3))
            nodules = rng.permutation(self.count)
            for n in range(self.count):
                start = np.floor(places[n] * (room + 1)).astype(int)
                if n >= aside:
                    box = boxes[nodules[n] % len(boxes)]
                    share = _INWARDS + (1 - 2 * _INWARDS) * inside[n]
                    middle = (box[:3] + box[3:]) / 2
                    start = np.clip(np.rint(middle - share * size), 0, room).astype(int)
                at.append([number, *start.tolist()])
                labels.append(boxes_within(boxes, start, size, most))
        images = PatchRows(self.volumes, np.array(at, dtype=np.int64), self.size)
        case = torch.arange(len(self.volumes)).repeat_interleave(self.count)
        return {"image": images, "label": torch.from_numpy(np.stack(labels)), "case": case}

    def some(self, cases: Sequence[int]) -> ScanPatches:
        """Restricts the patches to some of the scans."""
        volumes, boxes = [self.volumes[n] for n in cases], [self.boxes[n] for n in cases]
        return replace(self, volumes=volumes, boxes=boxes)


def boxes_within(boxes: Boxes, start: Ints, size: Ints, most: int) -> Boxes:
    """Returns the boxes that touch a patch, from its first voxel on, as a label (most, 7)."""
    moved = boxes - np.tile(start, 2).astype(np.float32)
    touch = ((moved[:, 3:] > 0) & (moved[:, :3] < size)).all(1)
    middle = (moved[:, :3] + moved[:, 3:]) / 2
    inside = ((middle >= 0) & (middle < size)).all(1)
    return _flagged(moved[touch], np.where(inside, 1, -1)[touch], most)


def _flagged(boxes: Boxes, flags: NDArray[Any], most: int) -> Boxes:
    """Returns boxes with their flags as a label of `most` rows, at least one; the rest is 0."""
    label = np.zeros((max(most, 1), 7), np.float32)
    label[: len(boxes)] = np.column_stack([boxes, flags])
    return label
