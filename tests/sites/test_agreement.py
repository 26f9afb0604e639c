"""What a coordinator may say, what a site's own file may say, and that nothing else is built."""

import json
import re
from pathlib import Path

import pytest

from medfed.config.compose import described, load
from medfed.config.spelling import EXISTING
from medfed.sites.agreement import READING, SITE_KEYS, Agreed, SiteFile, agreed_values, fingerprints
from medfed.standalone.errors import CheckpointError, ConfigError, MedfedError

SITES = ("cleveland", "va")
HEART = ("experiment=heart_pfednet", "rounds=2")


@pytest.fixture(scope="module")
def heart():
    return Agreed.of([*HEART, "codec.up=stc"], SITES)[0]


@pytest.fixture
def written(tmp_path):
    """Writes a site's file beside a folder of data."""
    (tmp_path / "data").mkdir()

    def write(text: str) -> SiteFile:
        (tmp_path / "site.yaml").write_text(text)
        return SiteFile.read(tmp_path / "site.yaml")

    return write


def test_a_site_composes_the_agreed_experiment_with_its_own_keys(heart, written, tmp_path):
    own = written(
        "site: va\ndata:\n  path: data\n  workers: 3\n  reader: {centres: [va]}\n"
        "threads: 2\ntrainer: gpu\nlogger: csv\n"
    )
    config = own.config(heart)
    assert config.data.path == str(tmp_path / "data")
    assert (config.threads, config.trainer.accelerator, config.folder) == (
        2,
        "gpu",
        str(tmp_path / "medfed"),
    )
    assert config.data.reader.centres == ["va"]
    assert config.codec.up["_target_"].endswith("STC")
    assert config.logger.save_dir == config.folder
    # All that must be alike is: at the coordinator, at this site, at any other.
    mine = fingerprints(config.values)
    assert mine == fingerprints(described([*heart.overrides, "data.path=null"]).values)
    other = Agreed.of([*HEART, "local.steps=7"], SITES)[0]
    theirs = fingerprints(other.config().values)
    apart = {key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)}
    assert {"local.steps", "codec.up._target_"} <= apart
    assert all(key == "local.steps" or key.startswith("codec.up.") for key in apart)


def test_what_the_coordinator_types_for_itself_is_not_agreed():
    typed = ["trainer=gpu", "logger=csv", "data.path=/data", "threads=3", "init.weights=a.pt"]
    agreed, alone, said = Agreed.of([*HEART, *typed, "trainer.precision=64-true"], SITES)
    assert agreed.overrides == (*HEART, "trainer.precision=64-true")
    assert alone == ["trainer=gpu", "logger=csv", "threads=3", "init.weights=a.pt"]
    assert said[1] == "logger=csv applies only at the coordinator; sites set it in their files."
    assert said[2] == "data.path=/data is left out: each site sets data.path in its file."
    assert agreed.config().trainer.precision == "64-true"
    assert agreed.config().trainer.accelerator == "cpu"


def test_data_of_ones_own_get_their_usual_defaults():
    own, cut = (Agreed.of(["experiment=brats_pfednet"], ["a"], c)[0].config() for c in (0, 1))
    assert own.data.partition["_target_"].endswith("Auto")
    assert own.data.patches == "fresh"
    assert cut.data.partition["_target_"] == load(["experiment=brats_pfednet"]).partition._target_


def test_an_agreement_is_read_as_it_was_written(heart, tmp_path):
    heart.write(tmp_path / "agreed.json")
    assert Agreed.read(tmp_path / "agreed.json") == heart
    record = json.loads((tmp_path / "agreed.json").read_text())
    for bad in ({**record, "sites": "va"}, {**record, "overrides": [1]}, []):
        (tmp_path / "agreed.json").write_text(json.dumps(bad))
        with pytest.raises(CheckpointError):
            Agreed.read(tmp_path / "agreed.json")
    record["medfed"] = "0.1.7"
    (tmp_path / "agreed.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"agreed on medfed 0\.1\.7, .* wheel of your kit"):
        Agreed.read(tmp_path / "agreed.json")


# Each of these reached a site from a coordinator that nobody should have trusted.
FOREIGN = {
    "+x=1": "Unknown key 'x'",
    "+data.x={_target_:subprocess.check_output,args:[[touch,MARK]]}": "nothing that a",
    "model.network._target_=builtins.eval": "nothing that a configuration may",
    "+model.x={_target_:medfed.run.loggers.wandb_logger,project:a}": "is not allowed",
    "model.loss={_target_:torch.load,f:MARK}": "nothing that a configuration may",
    "name=${oc.env:HOME}": "name holds ${oc.env:HOME}, an interpolation that",
    "name=${hydra:runtime.cwd}": "an interpolation that",
    "name=${${name}}": "cannot be read",
    "name=$\\{oc.env:HOME\\}": "an interpolation that",
    "+data.reader.classes=[$\\{oc.env:HOME\\},two]": "classes[0] holds ${oc.env:HOME}, an",
    "+data.reader.classes=['${data.path}',two]": "classes[0] holds ${data.path}, an",
    "+data.reader.classes=['${folder}',two]": "classes[0] holds ${folder}, an",
    "data.reader.centres=['${oc.env:HOME}']": "centres[0] holds",
    "+data.x={'${folder}':1}": "an interpolation|cannot be read|cannot be composed",
    "partition=${data.path}": "cannot|unknown|Unknown|no option",
    "seed=0,1": "seed has several values",
    "plugins=MARK": "plugins belongs to each site's file",
    "+plugins=MARK": "plugins belongs to each site's file",
    "data.path=/etc": "data.path belongs to each site's file",
    "++data.root=/": "data.root belongs to each site's file",
    "~trainer": "trainer belongs to each site's file",
    "logger=wandb": "logger belongs to each site's file",
    "hydra.run.dir=MARK": "hydra.run.dir belongs to each site's file",
    "hydra.searchpath=[MARK]": "hydra.searchpath belongs to each site's file",
    "hydra/launcher=joblib": "hydra/launcher is for Hydra's own use",
    "keep_out=[va]": "keep_out is for simulations",
    "a" * 2000: "are refused",
    "seed": "no override|cannot be read|cannot be composed",
    "seed=[": "cannot be read",
}


@pytest.mark.parametrize("override", FOREIGN)
def test_what_no_coordinator_can_say(override, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = re.compile(FOREIGN[override].replace("${", r"\$\{").replace("[0]", r"\[0\]"))
    with pytest.raises(ConfigError, match=wanted) as caught:
        Agreed(SITES, (*HEART, override.replace("MARK", str(tmp_path / "mark")))).config()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_sites_own_keys_win_however_the_others_are_set(written):
    sly = Agreed(SITES, (*HEART, "data={path:/etc}"))
    assert sly.config().data.path is None
    assert written("site: va\ndata: {path: data}").config(sly).data.path.endswith("/data")


def test_sites_have_data_of_their_own():
    with pytest.raises(ConfigError, match=r"MixtureDataModule are generated, .* cut=true"):
        Agreed.of(["experiment=synthetic_ppfl"], SITES)
    for sites in ((), ("a", "a"), ("a/b",), ("a b",), ("..\n",)):
        with pytest.raises(ConfigError, match=r"must name every site|must have a name of letters"):
            Agreed(sites)


WRONG = {
    "": "it has no lines of a key, a colon, a space and a value",
    "site: va\ndata:\n\tpath: data": "line 3: found character .* indented by spaces, not by tabs",
    "site: va\ndata:\npath: data": "data has no value; .* indent the lines below it",
    "site: va\nagreed:": "agreed has no value",
    "site: va\nleast: 20": r"unknown \(did you mean policy\.least",
    "site: 3": "must have the site.s name",
    "site: [": r"line [12]: .* correct the site's file",
    "site: vaa\ndata: {path: data}": r"is not in the agreement \(did you mean va\?\)",
    "site: va": "does not name its data",
    "site: va\ndata: {path: nowhere}": "nowhere does not exist",
    "site: va\ndata: {path: 3}": "data.path must be a path",
    "site: va\ndata: {path: data, normalization: minmax}": "data.normalization is agreed among all",
    "site: va\nseed: 3": "seed is agreed among all sites",
    "site: va\nthreds: 3": r"unknown \(did you mean threads",
    "site: va\ndata: {path: data}\nthreads: many": "threads must be a whole number",
    "site: va\ndata: {path: data}\ntrainer: tpu": "Unknown trainer 'tpu'",
    "site: va\ndata: {path: data}\ntrainer: {precision: 64}": "trainer.precision is not for a site",
    "site: va\ndata: {path: data}\ntrainer: {devices: 2}": "a site trains one client",
    "site: va\ndata: {path: data}\nplugins: nowhere": "is no folder",
    "site: va\nresume: x": "resume is not for a site to set",
    "site: va\ndata: {path: data, reader: {fold: 3}}": None,
}


@pytest.mark.parametrize("text", WRONG)
def test_what_no_site_can_say(text, written, heart):
    if WRONG[text] is None:  # a reader's argument is looked at when it is built
        assert written(text).config(heart).data.reader.fold == 3
        return
    with pytest.raises(MedfedError, match=WRONG[text]) as caught:
        written(text).config(heart)
    assert "\n" not in str(caught.value)


def test_a_reader_of_its_own_takes_the_place_of_the_agreed_one(written):
    agreed = Agreed.of(["experiment=brats_pfednet", "data.patch_size=[16,16]"], ["va"])[0]
    target = "medfed.datamodules.readers.case_folders.FolderReader"
    config = written(
        f"site: va\ndata:\n  path: data\n  reader: {{_target_: {target}, _partial_: true}}"
    ).config(agreed)
    assert config.data.reader == {"_target_": target, "_partial_": True}
    assert "data.reader.channels" in agreed_values(agreed.config().values)
    foreign = "site: va\ndata: {path: data, reader: {_target_: os.system}}"
    with pytest.raises(ConfigError, match="nothing that a configuration may build"):
        written(foreign).config(agreed)


def test_every_key_that_names_a_file_is_a_sites_own():
    """Whoever adds one must say here whose it is."""
    assert {*EXISTING} <= {*SITE_KEYS}
    assert not {*SITE_KEYS} & {*READING}


def test_plugins_count_by_their_content(written, heart, tmp_path):
    code = tmp_path / "code"
    (code / "configs").mkdir(parents=True)
    (code / "mine.py").write_text("x = 1\n")
    own = written("site: va\ndata: {path: data}\nplugins: [code]")
    first = fingerprints(own.config(heart).values)
    assert "plugins" in first
    Path(code / "mine.py").write_text("x = 2\n")
    assert fingerprints(own.config(heart).values)["plugins"] != first["plugins"]
    assert "plugins" not in fingerprints(heart.config().values)
