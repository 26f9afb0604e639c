"""Segmentation of volumes and pictures: patches for training, whole images for evaluation."""

from __future__ import annotations

import copy
import math
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from medfed.common.floors import Statistic
from medfed.datamodules import fresh_patches, patches
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache import volumes as cached
from medfed.datamodules.cache.store import Item, Recipe
from medfed.datamodules.client_data import Batch, Block, BlocksOnDemand, ClientData
from medfed.datamodules.duplicates import Sample, content
from medfed.datamodules.extending import *
from medfed.datamodules.one_site import Claims, Half, Merging, OwnData
from medfed.datamodules.patches import BoxedVolume, PreparedCase
from medfed.datamodules.planning import Agreed, Planning, facts_of
from medfed.datamodules.plans import ClientPlan, by_id, has_channels, labels_of_clients, match_files
from medfed.standalone.files import sha256
from medfed.standalone.normalization import Rule, rules_of
from medfed.standalone.preparation import BLANK, Preparation
from medfed.standalone.volume_files import files_of, files_of_case
from medfed.standalone.volumes import read_volume
from medfed.standalone.voxels import axial, brain_slices, plane_of, with_neighbours

log = logging.getLogger(__name__)
_USUAL = Preparation((Rule("zscore_nonzero"),))


@dataclass(eq=False, repr=False)
class SegmentationDataModule(cached.CachedDataModule[VolumeReader]):
    """Multi-channel volumes with region masks, from any reader.

    Patches are cut from the training patients' volumes, anew for every epoch or once. The volumes
    stay in memory, and so do the slices (or volumes) of the other patients, unless they take more
    than `memory_gb`. Then training volumes are mapped from a cache of all volumes, which is made if
    it is missing, and the others are read from it patient by patient at every evaluation. An
    existing cache is always used; it does not change results. Clients then hold ``image`` (N, C, h,
    w[, d]) and ``label`` (N, R, h, w[, d]).

    If volumes are resampled or cropped, patches have the new grid, but evaluation keeps the masks
    of the files: batches carry a ``grid``, which maps predictions to the masks' voxels.
    """

    millimetres: ClassVar = True  # whether evaluation batches hold the size of a voxel

    _: KW_ONLY
    # How grey values are normalised, see `normalization.rules_of`; None: the default of the data.
    normalize: Any = None
    # mm to which volumes are resampled, see `preparation.Preparation`; two for slices.
    spacing: Sequence[float] | None = None
    crop_foreground: bool = False  # whether to crop to the body, see there
    # For 2-D: how many adjacent slices a network gets as channels, including the slice.
    slices: int = 1
    spatial_dims: int = 2  # 2 for axial slices, 3 for volumes
    # Images up to this size (10^9 bytes) stay in memory: first those for validation and test, then
    # the training volumes.
    memory_gb: Annotated[float, check_not_negative] = 2.0
    patch_size: Sequence[int] | None = (64, 64)  # (h, w) or (h, w, d)
    # ``"fresh"``: cut anew for every epoch, equally often on all regions of a patient (see
    # `fresh_patches`); ``"fixed"``: cut once, on any voxel of any region.
    patches: Literal["fresh", "fixed"] = "fixed"
    # Patches from every training patient, in every epoch.
    patches_per_patient: Annotated[int, check_count] = 32
    # Share of the patches centred outside the tumour.
    background_share: Annotated[float, within("[0, 1]")] = 0.25
    # Validate on every n-th axial slice with brain, 1 for all; tests take all.
    eval_every: Annotated[int, check_count] = 1
    # Patches per training batch.
    batch_size: int | None = 16  # type: ignore[assignment]  # None until it is planned
    eval_batch_size: int = 16  # slices per evaluation batch; each volume is a separate batch
    # Regions by hospital, of hospitals that do not outline all; the others have no loss and no
    # metric there.
    annotated: Mapping[str, Sequence[str]] | None = None
    # How clients agree on `patch_size`, `batch_size`, `spacing`, `normalize` and the network, of
    # which the first three are then None unless the user sets them; None: they do not.
    planning: Planning | None = None

    def __post_init__(self) -> None:
        planned = {name: getattr(self, name) for name in ("spacing", "patch_size", "batch_size")}
        self.fixed = {name: value for name, value in planned.items() if value is not None}
        if self.planning is None and len({"patch_size", "batch_size"} & {*self.fixed}) < 2:
            raise ConfigError(
                "data.patch_size and data.batch_size may be null only if clients plan, as with "
                "experiment=nnunet; set them."
            )
        self.patch_size = self.patch_size or (64, 64, 64)[: self.spatial_dims]
        self.batch_size = self.batch_size or 2
        super().__post_init__()
        if self.slices < 1 or self.slices % 2 == 0 or (self.slices > 1 and self.spatial_dims == 3):
            raise ConfigError(
                f"data.slices={self.slices} must be odd, such as 3 for a slice and its two "
                "neighbours; with data.spatial_dims=3 it must be 1."
            )
        if self.spacing is not None and len(self.spacing) != self.spatial_dims:
            raise ConfigError(
                f"data.spacing={list(self.spacing)} must have {self.spatial_dims} numbers for "
                f"data.spatial_dims={self.spatial_dims}: the distance of slices does not change."
            )
        self.size = patches.patch_size_3d(self.patch_size, self.spatial_dims)
        self._slices = self.slices if self.spatial_dims == 2 else None  # for `PatchRows`
        self._mapped = False
        self.joins = False  # whether a federation that has all channels takes these data in

    @property
    def exclusive(self) -> bool:
        """Whether no voxel is in two regions; several such regions are trained with a softmax."""
        return self.scans.exclusive

    @property
    def in_channels(self) -> int:
        """Input channels of a network: those of the images, with each one's neighbours."""
        return len(self.channel_names) * self.slices

    @cached_property
    def preparation(self) -> Preparation | None:
        """The preparation of every volume; None uses only the reader's normalisation."""
        changed = self.normalize is not None or self.spacing is not None or self.crop_foreground
        setting = self.scans.normalize if self.normalize is None else self.normalize
        if self.scans.normalize == "own":
            if changed:
                raise ConfigError(
                    f"{type(self.scans).__name__} prepares its images itself; leave "
                    "data.normalize and data.spacing at null, and data.crop_foreground at false."
                )
            return None
        rules = rules_of(setting, self.scans.channels)
        mm = None if self.spacing is None else tuple(map(float, self.spacing))
        chosen = Preparation(rules, mm, self.crop_foreground)
        plain = chosen.keeps_grid and {rule.name for rule in rules} == {"zscore_nonzero"}
        return None if plain else chosen

    def half(self, client: str) -> Half[Agreed | None]:
        """See the base class: facts about its training cases, if clients agree on a plan."""
        if self.planning is None:
            return None
        plan = self.plans[client]
        cases = [case for case, _ in self.cases_among(plan.patients["train"])]
        plain = ((case, self.unprepared(case, plan)) for case in cases)
        spacing, names = self.scans.spacing, self.channel_names
        measured = (facts_of(*of, spacing(self.cases[case]), names) for case, of in plain)
        answer = yield self.planning.client_message(measured)
        self.follow(agreed := Agreed.read(answer))
        return agreed

    def follow(self, agreed: Agreed) -> None:
        """Takes the settings of a plan on which clients have agreed."""
        plan = agreed.plan
        self.agreed, self.spacing, self.crop_foreground = agreed, plan.spacing, True
        self.patch_size, self.batch_size = plan.patch_size, plan.batch_size
        self.size = patches.patch_size_3d(plan.patch_size, self.spatial_dims)
        by_user = self.normalize is not None
        rules = rules_of(self.normalize, self.scans.channels) if by_user else agreed.rules()
        self.preparation = Preparation(rules, plan.spacing, crop=True)

    def join(self, federation: FederatedDataModule) -> None:
        """See the base class."""
        assert isinstance(federation, SegmentationDataModule)
        if federation.agreed is not None:
            self.follow(federation.agreed)
        self.preparation = federation.preparation  # on which clients may have agreed
        self.joins = True

    def merging(self, facts: Mapping[str, Any], claims: Claims | None = None) -> Merging:
        """See the base class."""
        if self.planning is not None:
            names, labels = facts["channels"], len(facts["classes"]) + 1
            yield self.planning.server_answer(
                (yield b""), names, labels, self.spatial_dims, **self.fixed
            )

    def summaries(self, client: str) -> list[Statistic]:
        """See the base class: facts for a plan."""
        if self.planning is None:
            return []
        patients = len(self.plans[client].patients["train"])
        return [self.planning.statistic(client, patients, self.channel_names)]

    def facts(self) -> dict[str, Any]:
        """See the base class; also whether regions exclude each other."""
        return {**super().facts(), "exclusive": self.exclusive}

    def plan(self) -> None:
        """See the base class; clients lack channels without files, and regions by `annotated`."""
        super().plan()
        annotations = self.annotated or {}
        for client in annotations:  # a site reads the agreed key, which names other sites, too
            check_known("data.annotated", client, getattr(self.partition, "sites", self.plans))
        of = self._cases_by_patient
        self.annotate(labels_of_clients(self.plans, of, self.class_names, annotations))
        if any(case.lacks for case in self.cases.values()):
            self.plans = match_files(self.plans, of, self.channel_names, self.scans.missing)
            # Other hospitals may have it.
            if self.absent and not (self.joins or isinstance(self.partition, OwnData)):
                raise DataError(
                    f"No case has a file of {few(self.absent)} (cases with a file, of "
                    f"{len(self.cases)}: {', '.join(f'{c} {n}' for c, n in self._files.items())}); "
                    "mend its name or pattern, or leave it out of data.reader.channels."
                )

    @property
    def _files(self) -> dict[str, int]:
        """How many cases have a file, by channel."""
        cases = self.cases.values()
        return {name: sum(name not in c.lacks for c in cases) for name in self.channel_names}

    @property
    def absent(self) -> list[str]:
        """See the base class."""
        return [name for name, count in self._files.items() if not count]

    def prepare_data(self) -> None:
        """Generates the cohort if no path is given and it does not exist yet."""
        self.channel_names = self.scans.channels
        self.class_names = self.scans.regions
        if self.planning is not None:
            return
        rules = self.preparation.rules if self.preparation else ()
        windows = [(rule.low, rule.high) for rule in rules if rule.name == "window"]
        if self.normalize is None and windows:
            log.info(
                "CT: grey values from %g to %g HU, soft tissue, become 0 to 1; for lungs set "
                "'data.normalize={window: [-1000, 400]}'.",
                *windows[0],
            )

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: volumes in RAS; a 2-D model gets axial slices.

        `preparation.Preparation.from_record` reads the preparation from it; ``input`` has
        ``adjacent_slices``, how many slices a network gets as channels.
        """
        return {**super().preprocessing(client), **self._alike}

    @cached_property
    def _alike(self) -> dict[str, Any]:
        """The steps that are the same at all clients, once they have agreed."""
        return {
            "orientation": "RAS",
            **(self.preparation or _USUAL).record(),
            **({} if self.agreed is None else {"plan": self.agreed.plan.record()}),
            "input": {"kind": "volumes", "adjacent_slices": self.slices, **self.scans.layout()},
        }

    @cached_property
    def cases(self) -> dict[str, Patient]:
        """All cases by id: a patient is one, or has several. Known after `setup` has begun."""
        return by_id([case for cases in self._cases_by_patient.values() for case in cases])

    @cached_property
    def _cases_by_patient(self) -> dict[str, list[Patient]]:
        return {name: self.scans.cases_of(of) for name, of in self.patients.items()}

    def cases_among(self, patients: Sequence[str]) -> list[tuple[str, int]]:
        """The cases of patients, and the position of each case's patient in the list."""
        listed = [(n, self._cases_by_patient[p]) for n, p in enumerate(patients)]
        return [(case.id, n) for n, cases in listed for case in cases]

    def recipe(self) -> Recipe:
        """The cache's recipe: every patient's volume from the reader."""
        reader, path = self.scans, given_path(self.source).resolve()
        patients = list(self.patients.values()) or reader.patients()
        cases = [case for of in [reader.cases_of(patient) for patient in patients] for case in of]
        lacking = any(case.lacks for case in cases)
        if not self.plans and (lacking or self.planning is not None):
            self.plan()  # which refuses files that are missing
        if self.planning is not None:
            self.agree()
        prepared = self.preparation
        files = [tuple(files_of_case(c.files.values(), reader.series)) for c in cases]
        pairs = zip(cases, files, strict=True)
        items = [Item(c.id, of, of, (reader, c, prepared)) for c, of in pairs]
        # The path distinguishes data sets with the same patient ids.
        settings = {"path": str(path), "reader": reader.record()}
        if prepared is not None:
            settings["preparation"] = prepared.record()
        again = "medfed prepare with the same data settings"
        return Recipe("volumes", settings, tuple(items), cached.read_case, False, again)

    def resampled_shapes(self, cases: Sequence[str]) -> list[tuple[int, ...]]:
        """Voxels of each case after resampling, before cropping."""
        of = [self.cases[case] for case in cases]
        shapes = [tuple(shape) for shape in self.scans.shapes(of)]
        wanted = self.spacing or ()
        for at, spacing in enumerate(self.scans.spacings(of) if wanted else ()):
            axes = zip(shapes[at], spacing, wanted, strict=False)
            sides = tuple(max(1, round(n * old / new)) for n, old, new in axes)
            shapes[at] = sides + shapes[at][len(sides) :]
        return shapes

    def file_hashes(self, patients: Sequence[str]) -> dict[str, str]:
        """See the base class; a cache has the hashes of its source files."""
        cases = [self.cases[case] for case, _ in self.cases_among(patients)]
        if self.store is None:
            paths = [path for case in cases for path in case.files.values()]
            files = files_of_case(paths, self.scans.series)
            return {str(path): sha256(path) for path in sorted(set(files))}
        return dict(sorted(item for c in cases for item in self.store.hashes(c.id).items()))

    def unprepared(self, case: str, plan: ClientPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Reads a case's image with its files' grey values, its label, and (C,) what is there."""
        reader: Any = copy.copy(self.scans)
        if reader.normalize == "own":  # pictures: 0 for black, 1 for white
            reader.normalization = "unit"
        plain = Preparation((Rule("none"),) * len(self.channel_names))
        sample = reader.prepared(self.cases[case], plain)
        present = plan.channels & has_channels(self.cases[case], self.channel_names)
        sample["image"][~present] = 0
        return sample["image"], sample["label"], present

    def prepared(self, case: str, plan: ClientPlan) -> PreparedCase:
        """Prepares a case for a client's network."""
        if self.store is not None:
            sample = cached.cached_volume(self.store, case)
        else:
            sample = self.scans.prepared(self.cases[case], self.preparation)
        image, label, grid = sample["image"], sample["label"], sample.get("grid")
        brain = (image != 0).any(dim=0)
        if not brain.any():
            file = next(iter(self.cases[case].files.values()))
            raise DataError(f"{file} {BLANK}, or leave the patient out.")
        if plan.scanner is not None:
            scaled = self.preparation and all(r.is_scaled for r in self.preparation.rules)
            # For images on a fixed scale, a scanner needs values from -1 to 1.
            image = plan.scanner.apply(image * 2 - 1 if scaled else image, case)
            image = (image + 1) / 2 if scaled else image
        # Last: otherwise the scanner's noise would fill channels that the client lacks.
        present = plan.channels
        if self.cases[case].lacks:
            present = present & has_channels(self.cases[case], self.channel_names)
        image[~present] = 0
        if plan.annotated is not None:
            outlined = torch.tensor([name in plan.annotated for name in self.class_names])
            label = label * outlined.view(-1, 1, 1, 1).to(label.dtype)
        if plan.label_order is not None:
            label = label[torch.tensor(plan.label_order).argsort()]
        return PreparedCase(image, label, brain, present, grid, sample.get("spacing"))

    @property
    def window(self) -> tuple[int, ...] | None:
        """The default size of the window that a network evaluates at once.

        The network evaluates slices whole; volumes, whose depth rarely fits, and slices of any size
        are evaluated window by window.
        """
        on_grid = self.preparation is None or self.preparation.keeps_grid
        if self.spatial_dims == 2 and on_grid and not self.scans.any_size:
            return None
        return self.size[: self.spatial_dims]

    def settings(self) -> dict[str, Any]:
        """How patches were cut and slices chosen."""
        more: dict[str, Any] = {} if self.preparation is None else self.preparation.record()
        return {
            **more,
            **({"slices": self.slices} if self.slices > 1 else {}),
            "patch_size": list(self.size[: self.spatial_dims]),
            "patches": self.patches,
            "patches_per_patient": self.patches_per_patient,
            "background_share": self.background_share,
            "eval_slices": "all axial slices with brain" + self._thinned
            if self.spatial_dims == 2
            else "whole volumes",
        }

    @property
    def _thinned(self) -> str:
        every = self.eval_every
        return f"; in validation one of {every} (data.eval_every={every})" if every > 1 else ""

    def uneven(self) -> tuple[str, list[float]] | None:
        """Which clients have voxels of other sizes, and the size to which to resample.

        None if they are alike, unknown or resampled. Along the slices of a 2-D model sizes stay.
        """
        if self.spacing or self.planning or self.scans.normalize == "own" or len(self.plans) < 2:
            return None
        patients = {c: plan.every for c, plan in self.plans.items()}
        cases = {c: self.cases_among(of) for c, of in patients.items()}
        names = [case for of in cases.values() for case, _ in of]
        every = iter(self.scans.spacings([self.cases[case] for case in names]))
        sizes: dict[str, Any] = {
            client: np.median([*islice(every, len(of))], axis=0) for client, of in cases.items()
        }
        return cached.uneven_sizes(sizes, self.spatial_dims)

    def data_remarks(self) -> list[str]:
        """See the base class: which slices validation leaves out, and whose voxels differ."""
        thinned = self.spatial_dims == 2 and self._thinned
        remarks = [f"Tests measure all axial slices with brain{thinned}."] if thinned else []
        if (uneven := self.uneven()) is not None:
            size = ",".join(f"{mm:g}" for mm in uneven[1])
            remarks.append(f"{uneven[0]} data.spacing=[{size}] resamples images to one size.")
        return remarks

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """See the base class."""
        patients = {s: [i for plan in plans.values() for i in plan.patients[s]] for s in SPLITS}
        cases = {s: [case for case, _ in self.cases_among(of)] for s, of in patients.items()}
        shapes = {split: self.resampled_shapes(of) for split, of in cases.items()}
        self._check_patches(cases["train"], shapes["train"])
        sizes = {split: self._bytes(of, split) for split, of in shapes.items()}
        evaluated = sizes["val"] + sizes["test"]
        in_memory = evaluated <= self.memory_gb * 1e9
        large = evaluated + sizes["train"] > self.memory_gb * 1e9
        self._mapped = self.patches == "fresh" and large
        if self.find_cache() is None and (self._mapped or not in_memory):
            log.info("Prepared the volumes once, in %s.", self.build_cache().folder)
        return {name: self._client(name, plan, in_memory) for name, plan in plans.items()}

    def _check_patches(self, cases: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuses patches that would be mostly padding and waste memory."""
        for case, shape in zip(cases, shapes, strict=True):
            if max(self.size) > 2 * max(shape):
                size = list(self.size[: self.spatial_dims])
                raise ConfigError(
                    f"data.patch_size={size} is more than twice as large as "
                    f"the volume of patient {case} {shape}; choose smaller patches."
                )

    def _bytes(self, shapes: Sequence[tuple[int, ...]], split: Split) -> int:
        """Approximate bytes of all images and labels of a split, including air."""
        voxel = 4 * self.in_channels + len(self.class_names)
        sparse = self.spatial_dims == 2 and split == "val"
        return sum(map(math.prod, shapes)) * voxel // (self.eval_every if sparse else 1)

    def _client(self, name: str, plan: ClientPlan, in_memory: bool) -> ClientData:
        parts = plan.patients
        if not parts["train"]:
            raise DataError(f"Client {name} has no training patient; give it more patients.")
        train, more = self._fresh(name, plan) if self.patches == "fresh" else self._fixed(plan)
        evaluation: dict[Split, Iterable[Block]] = {}
        for split in SPLITS[1:]:
            cases = self.cases_among(parts[split])
            names = [case for case, _ in cases]
            every = self.eval_every if split == "val" else 1
            read = partial(self._nth_block, places=[n for _, n in cases], plan=plan, every=every)
            if in_memory:
                evaluation[split] = [read(case, n) for n, case in enumerate(names)]
            else:
                evaluation[split] = BlocksOnDemand(names, read)
        client = self.client_of(name, plan, train=train, evaluation=evaluation, **more)
        return client if self.spatial_dims == 2 else replace(client, eval_batch_size=1)

    def _fixed(self, plan: ClientPlan) -> tuple[Block, dict[str, Any]]:
        """Patches that are cut once, with their voxel counts."""
        cases = self.cases_among(plan.patients["train"])
        random = [torch_rng(self.seed, "patches", case) for case, _ in cases]
        blocks = [self._cut(*at, plan, rng) for at, rng in zip(cases, random, strict=True)]
        train, counts = patches.joined_patches(blocks)
        return train, {"label_counts": counts}

    def _fresh(self, name: str, plan: ClientPlan) -> tuple[Block, dict[str, Any]]:
        """The first set of patches with voxel counts, and the object that cuts further sets."""
        cases = [self.cases_among([patient]) for patient in plan.patients["train"]]
        volumes = [[self._volume(case, plan) for case, _ in of_patient] for of_patient in cases]
        count, share = self.patches_per_patient, self.background_share
        fresh = fresh_patches.FreshPatches(volumes, count, share, self.size, self._slices)
        train = fresh.block(derive_seed(self.seed, "patches", name))
        return train, {"label_counts": fresh_patches.counts_of(train["label"]), "fresh": fresh}

    def _volume(self, case: str, plan: ClientPlan) -> BoxedVolume:
        """A training case's volume: mapped, unless it fits in memory or a scanner changes it."""
        prepared = self.prepared(case, plan)
        rng = numpy_rng(self.seed, "places", case)
        if self._mapped and self.store is not None and plan.scanner is None:
            arrays = self.store.arrays(case)
            return fresh_patches.volume_of_cache(
                arrays, prepared.mask(), prepared.brain, prepared.present, rng
            )
        return fresh_patches.volume_of(
            prepared.image, prepared.mask(), prepared.brain, rng, prepared.present
        )

    def contents(self) -> tuple[str, list[Sample]]:
        """See the base class: the files of the images, byte by byte."""
        used = [i for plan in self.plans.values() for i in plan.every]
        every = [(i, role, path) for i in used for role, path in self.patients[i].files.items()]
        files = [
            (i, role, path, self.hashes[str(file)])
            for i, role, path in every
            if not role.split()[-1].startswith(("label", "mask"))
            for file in files_of(path, self.scans.series)
        ]
        counts = Counter(digest for *_, digest in files)
        repeated = {h: path for *_, path, h in files if counts[h] > 1 and is_volume(path)}
        # Volumes of one value, such as zeros for a missing contrast, are no copies of each other.
        volumes = ((h, read_volume(p, series=self.scans.series)) for h, p in repeated.items())
        empty = {h for h, volume in volumes if content(volume.voxels.numpy()) is None}
        return "image files", [Sample(i, f"{i} {r}", h) for i, r, _, h in files if h not in empty]

    def _nth_block(
        self, case: str, at: int, places: list[int], plan: ClientPlan, every: int
    ) -> Batch:
        block = self.evaluation_block(case, places[at], plan, every)
        if places.count(places[at]) == 1:
            return block
        # Slices of another scan of the same patient form another volume.
        return {**block, "scan": torch.full((len(block["case"]),), places[:at].count(places[at]))}

    def _cut(self, case: str, patient: int, plan: ClientPlan, rng: torch.Generator) -> Batch:
        """One case's patches, whose places depend on the seed and the case only.

        `patient`: the position of its patient among the client's.
        """
        of = self.patches_per_patient, self.background_share, self.size, self._slices
        cut = patches.fixed_patches(self.prepared(case, plan), *of, rng)
        return {**cut, "case": torch.full((len(cut["image"]),), patient)}

    def evaluation_block(self, case: str, patient: int, plan: ClientPlan, every: int = 1) -> Batch:
        """Returns one case's whole axial slices, or the volume."""
        image, label, brain, present, grid, spacing = self.prepared(case, plan)
        if spacing is None:
            spacing = torch.tensor(self.scans.spacing(self.cases[case]))
        mm = spacing.float()
        slices = brain_slices(brain, every)
        image = with_neighbours(image, self.slices)
        if self.spatial_dims == 3:
            image, label = image[None], label[None]
        else:
            below = 0 if grid is None else -int(grid[2, 3].round())  # slices that were cropped away
            image, label = axial(image, slices), axial(label, slices + below)
            grid = None if grid is None else plane_of(grid)
            mm[2] *= every
        count = len(image)
        beside = {"case": torch.full((count,), patient)}
        if self.millimetres:
            beside["spacing"] = mm.expand(count, -1)
        beside["present"] = present.repeat_interleave(self.slices).expand(count, -1)
        if grid is not None:
            beside["grid"] = grid.expand(count, *grid.shape)
        return {"image": image, "label": label, **beside}


@dataclass(eq=False, repr=False)
class ImageMasksDataModule(SegmentationDataModule):
    """Pictures with masks; a patient may have several.

    All other code treats them as volumes whose slices are a patient's pictures, see
    `readers.image_masks.ImageMasksReader`. The size of their pixels is unknown: distances in mm are
    undefined. The reader prepares pictures itself.
    """

    millimetres: ClassVar = False  # unknown

    planning: Planning | None = field(default=None, init=False)
    normalize: Any = field(default=None, init=False)
    spacing: Sequence[float] | None = field(default=None, init=False)
    crop_foreground: bool = field(default=False, init=False)
    slices: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spatial_dims != 2 or self.eval_every != 1:
            raise ConfigError(
                f"data.spatial_dims={self.spatial_dims} and data.eval_every={self.eval_every} are "
                "for volumes; every picture is evaluated: leave them at 2 and 1."
            )

    @property
    def window(self) -> tuple[int, ...]:
        """See the base class: pictures have any size, which few networks accept."""
        return self.size[:2]

    def settings(self) -> dict[str, Any]:
        """See the base class."""
        return {**super().settings(), "eval_slices": "every picture, whole"}

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: a picture needs other facts than a volume."""
        # Not those of the base class: spacing and orientation of pictures are unknown.
        return {
            **FederatedDataModule.preprocessing(self, client),
            "normalization": {"name": self.scans.record()["normalization"]},
            "input": {"kind": "pictures", **self.scans.layout()},
        }
