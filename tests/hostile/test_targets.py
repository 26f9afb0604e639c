"""What a configuration names is built only if it is on the list, wherever and however it stands."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch
from omegaconf import OmegaConf

from medfed.commands.evaluate import main as evaluate
from medfed.commands.export import main as export
from medfed.commands.train import main as train
from medfed.config.allowed import check_targets, shipped
from medfed.config.compose import build, load
from medfed.delivery.bundle.networks import build_network
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.integration.runs import CLINICAL, left_in
from tests.sweeps import sweep

NOT_ON_THE_LIST = "is nothing that a configuration may build"
REFUSED = (
    *(
        "torch.load",
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "pickle.loads",
        "subprocess.run",
    ),
    *("hydra.utils.get_method", "hydra.utils.get_object", "hydra.utils.get_class"),
    *(
        "hydra.utils.instantiate",
        "hydra.utils.call",
        "functools.partial",
        "importlib.import_module",
    ),
    # The package's own that run, write or read, or lead elsewhere.
    *("medfed.api.train", "medfed.run.train.train", "medfed.run.prepare.prepare"),
    *(
        "medfed.records.folder.torch.load",
        "medfed.standalone.files.write_text",
        "medfed.config.compose.build",
    ),
    *("medfed.personalize.fedavg.FedAvg.init", "medfed.federation.algorithm.Cohort.__init__"),
    # Libraries: through an allowed module, or what is no optimizer, layer, loss or transform.
    *("torch.optim.sgd.torch.load", "torch.nn.modules.module.torch.load", "torch.hub.load"),
    *(
        "torch.nn.Module.load_state_dict",
        "torch.nn.Identity.__subclasses__",
        "torch.nn.init.zeros_",
    ),
    *("torch.jit.load", "torch.utils.data.DataLoader", "torch.optim.swa_utils.update_bn"),
    *(
        "monai.networks.nets.resnet.torch.load",
        "monai.networks.nets.densenet.load_state_dict_from_url",
    ),
    *("monai.networks.nets.hovernet.download_url", "monai.networks.nets.Transchex"),
    *("torchmetrics.image.fid.FrechetInceptionDistance", "torchmetrics.utilities.data.torch.load"),
    *("torchmetrics.classification.auroc.Any", "torchmetrics.functional.accuracy"),
    *("monai.metrics.compute_roc_auc", "monai.metrics.metric.torch.load"),
    *("monai.optimizers.generate_param_groups", "monai.optimizers.LearningRateFinder"),
    *("monai.losses.PerceptualLoss", "monai.transforms.LoadImage", "monai.transforms.SaveImaged"),
    *("monai.transforms.Lambdad", "monai.transforms.RandLambda", "monai.transforms.TorchVisiond"),
    *("monai.transforms.io.array.locate", "monai.bundle.run", "monai.bundle.ConfigParser"),
    *("monai.apps.download_and_extract", "monai.utils.optional_import"),
    *("pytorch_lightning.Trainer.fit", "pytorch_lightning.callbacks.LambdaCallback"),
    # No names.
    *("", "os", "..", "os.system ", "${oc.env:HOME}", "${algorithm._target_}", "torch.nn.x y"),
    *(None, 3, ["os.system"], {"_target_": "os.system"}),
)
ALLOWED = (
    *("monai.metrics.DiceMetric", "monai.optimizers.Novograd", "torchmetrics.regression.R2Score"),
    *("torchmetrics.classification.BinaryAUROC", "monai.optimizers.WarmupCosineSchedule"),
    *("torch.optim.AdamW", "torch.optim.lr_scheduler.OneCycleLR", "torch.nn.CrossEntropyLoss"),
    *("monai.networks.nets.DenseNet169", "monai.networks.nets.resnet18", "monai.losses.DiceCELoss"),
    *("monai.transforms.NormalizeIntensityd", "monai.transforms.OneOf", *sorted(shipped())),
)


@sweep("target", REFUSED)
def test_only_what_is_on_the_list(target):
    with pytest.raises(ConfigError) as caught:
        check_targets({"model": {"_target_": target}}, exists=True)
    assert str(caught.value).startswith("model._target_=")
    assert NOT_ON_THE_LIST in str(caught.value)
    assert "plugins=FOLDER" in str(caught.value)


def test_what_is_on_the_list_passes():
    for target in ALLOWED:
        fetching = {"pretrained": False} if target.endswith(".EfficientNetBN") else {}
        check_targets({"model": {"_target_": target, **fetching}}, exists=True)


@sweep(
    "node",
    [
        {"_target_": "monai.networks.nets.EfficientNetBN", "model_name": "efficientnet-b0"},
        {"_target_": "monai.networks.nets.resnet18", "pretrained": "weights.pth"},
        {"_target_": "monai.networks.nets.DenseNet121", "_args_": [2, 1, 2, 8, 8, [2], True]},
        {"_target_": "monai.networks.nets.HoVerNet", "pretrained_url": "http://localhost/x"},
    ],
)
def test_no_network_fetches_weights(node):
    with pytest.raises(ConfigError, match="would fetch or load trained weights"):
        check_targets(node, exists=True)


# Where a name can stand. The command would leave a file behind.
EVIL = {"_target_": "os.system", "command": "touch here"}
PLACES = {
    "itself": EVIL,
    "partial": {**EVIL, "_partial_": True},
    "not recursive": {"a": EVIL, "_recursive_": False},
    "positional": {"_target_": "torch.nn.Sequential", "_args_": [EVIL]},
    "list of lists": [[{"a": [EVIL]}]],
    "through a resolver": "${oc.create:'{_target_: os.system, command: touch here}'}",
    "through a resolver, escaped": r"\${oc.create:'{_target_: os.system, command: touch here}'}",
    "through a key elsewhere": "${elsewhere}",
    "interpolated": {"_target_": "${name}", "command": "touch here"},
}


@sweep("node", PLACES.values())
def test_wherever_it_stands_nothing_is_built(node, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = {"name": "os.system", "elsewhere": EVIL}
    part = {"_target_": "medfed.federation.algorithm.Cohort", "clients": node}
    with pytest.raises(ConfigError) as caught:
        build(OmegaConf.create({**whole, "part": part}).part)
    assert "part" in str(caught.value)
    assert not left_in(tmp_path)


def test_a_bundle_builds_only_what_bundles_are_made_of():
    for plain in ({"_target_": "torch.load", "f": "x"}, {"_target_": ["os.system"]}, {}):
        with pytest.raises(CheckpointError, match="not among those that are built"):
            build_network(plain)


@pytest.fixture(scope="module")
def finished(finished_run):
    return finished_run(*CLINICAL)


def said(command, *arguments: str) -> str:
    """What a command prints on stderr; it must end with status 1."""
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 1
    return str(ended.value)


class Payload:
    """Leaves a file where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("command", [evaluate, export], ids=["evaluate", "export"])
@pytest.mark.parametrize("place", ["cohort", "model.network", "trainer.callbacks"])
def test_a_run_folder_runs_no_pickle(place, command, finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["medfed"])
    monkeypatch.chdir(tmp_path)
    torch.save(Payload(), "x.pt")
    shutil.copytree(finished, "run")
    config = OmegaConf.load("run/config.yaml")
    node = {"_target_": "torch.load", "f": "x.pt", "weights_only": False}
    OmegaConf.update(config, place, [node] if place.endswith("s") else node, merge=False)
    OmegaConf.save(config, "run/config.yaml")
    before = left_in(tmp_path)
    said(command, "run=run")
    error = capsys.readouterr().err
    assert error.startswith(f"error: {place}")
    assert "_target_=torch.load" in error
    assert NOT_ON_THE_LIST in error
    assert error.count("\n") == 1
    assert left_in(tmp_path) == before
    assert not (tmp_path / "unpickled").exists()


def test_a_run_folder_reads_no_environment(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["medfed"])
    monkeypatch.setenv("SECRET", "hunter2")
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("buffers: averaged", "buffers: ${oc.env:SECRET}"))
    for command in (evaluate, export):
        said(command, f"run={tmp_path / 'run'}")
        error = capsys.readouterr().err
        assert "config.yaml holds an interpolation" in error
        assert error.count("\n") == 1
        assert "hunter2" not in error


COMMAND_LINE = {
    "cohort._target_=os.system": NOT_ON_THE_LIST,
    "+tuned.x={_target_:os.system,command:id}": NOT_ON_THE_LIST,
    "+cohort.x=[{_target_:torch.load}]": "cohort.x[0]._target_=torch.load",
    "optimizer._target_=torch.optim.sgd.torch.load": NOT_ON_THE_LIST,
    "cohort._target_=medfed.federation.algorithm.Cohrt": "mean medfed.federation.algorithm.Cohort",
    "hydra.launcher._target_=os.system": "hydra.launcher._target_ is for Hydra's own use",
    "hydra/launcher=os.system": "hydra/launcher is for Hydra's own use",
    "hydra.launcher.n_jobs=2": "hydra.launcher.n_jobs is for Hydra's own use",
    "+hydra/launcher=joblib": "hydra/launcher is for Hydra's own use",
    "hydra.sweeper._target_=os.system": "hydra.sweeper._target_ is for",
    "+hydra.callbacks.x._target_=os.system": "hydra.callbacks.x._target_ is for",
    "hydra={launcher:{_target_:os.system}}": "hydra is for Hydra's own use",
    "+codec@hydra.launcher=fp32": "codec@hydra.launcher is for",
    "+codec@_global_.hydra.launcher=fp32": "is for Hydra's own use",
    "hydra.searchpath=[file:///tmp]": "hydra.searchpath is for Hydra's own use",
    "hydra.job_logging.handlers.x.class=os.system": "hydra.job_logging.handlers.x.class is for",
    "+hydra.job.env_set.LD_PRELOAD=x": "hydra.job.env_set.LD_PRELOAD is for",
}


@sweep(("argument", "sentence"), COMMAND_LINE.items())
def test_the_command_line(argument, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["medfed"])
    monkeypatch.chdir(tmp_path)
    said(train, *CLINICAL, argument)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not left_in(tmp_path)


def test_a_plugin_folder_gives_what_it_defines_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "weekly_cohort.py").write_text(
        "import torch\nfrom os import system\nfrom medfed.federation.algorithm import Cohort\n"
        "class Weekly(Cohort):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    node = {"cohort": {"_target_": "weekly_cohort.Weekly"}}
    with pytest.raises(ConfigError, match=NOT_ON_THE_LIST):
        check_targets(node)  # its name is known, its folder not
    config = load([*CLINICAL, f"plugins={tmp_path}", "cohort._target_=weekly_cohort.Weekly"])
    assert type(build(config.cohort)).__name__ == "Weekly"
    for target in ("weekly_cohort.torch.load", "weekly_cohort.system"):
        with pytest.raises(ConfigError, match=NOT_ON_THE_LIST):
            check_targets({"cohort": {"_target_": target}}, exists=True)
