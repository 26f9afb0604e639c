"""Interpolations that are looked up have the values that OmegaConf gives them."""

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medfed.common.errors import ConfigError
from medfed.config.compose import CONFIG_DIR, composed
from medfed.config.interpolations import looked_up

EXPERIMENTS = sorted(p.stem for p in (CONFIG_DIR / "experiment").glob("*.yaml"))
METHODS = sorted(p.stem for p in (CONFIG_DIR / "algorithm").glob("*.yaml"))


def by_omegaconf(plain):
    """The values of OmegaConf; ``None`` for an error."""
    try:
        return OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except (OmegaConfBaseException, RecursionError):
        return None


@pytest.mark.parametrize("number", range(len(METHODS)), ids=METHODS)
def test_every_experiment_and_method_is_looked_up_like_omegaconf(number):
    more = (["optimizer=adam", "scheduler=cosine"], ["partition=auto", "seed=3"], [])[number % 3]
    source = composed(
        [
            f"experiment={EXPERIMENTS[number % len(EXPERIMENTS)]}",
            f"algorithm={METHODS[number]}",
            *["folder=nowhere", "++data.path=.", "init.weights=.", *more],
        ]
    )[0].source()
    found = looked_up(source)
    assert found is not None  # nothing is left to OmegaConf
    assert repr(found) == repr(by_omegaconf(source))  # also the types and the order of keys


ROOT = {"a": 1, "b": {"c": None, "d": [1, "x"], "e": "${a}"}, "h": "t"}
CALLS = ["oc.select", "either", "when", "oc.env", "now"]
KEYS = ["a", "b", "b.c", "b.d", "b.e", "b.none", "h", "h.x", "none", "x", ".a", "b.d.0"]
WORDS = ["1", "-2", "0.5", "1e-3", "1.5e3", "007", "inf", "nan", "null", "true", "word", "Word"]
OTHERS = ["'q'", "[1,2]", "[a, 0.5]", "[]", "[1,[2]]", "", " spaced ", "a b", "a}", "1_000", "0x1"]
WHOLE = ["${" + key + "}" for key in KEYS]
INNER = ["${oc.select:none,2}", "${either:${b.c},${when:${a},1,[3,4],0}}"]
ARGUMENTS = [*WORDS, *OTHERS, *WHOLE, *INNER]
SELECTED = [*(key for key in KEYS if key != "h.x"), "", "a b"]
COUNTS = ["", ",", "a,", ",a", "a,,b", "a,b,", "a", "a,1,2", "a,b,,1,2", "a,b,1,2,3"]
TEXTS = {
    "whole": [*ARGUMENTS, *(a + b for a in WHOLE for b in ["", " ", "x", *WHOLE])],
    "oc.select": [f"${{oc.select:{key},{a}}}" for key in SELECTED for a in ARGUMENTS],
    "either": [f"${{either:{a},{b}}}" for a in ARGUMENTS for b in ARGUMENTS],
    "when": [f"${{when:{a},{b},1,${{a}}}}" for a in ARGUMENTS for b in ARGUMENTS],
    "counts": ["${" + f"{name}:{a}" + "}" for name in CALLS for a in COUNTS],
}


@pytest.mark.parametrize("kind", TEXTS)
def test_what_is_looked_up_is_what_omegaconf_resolves(kind):
    for text in TEXTS[kind]:
        plain = {**ROOT, "x": text}
        if (found := looked_up(plain)) is not None:
            assert repr(found) == repr(by_omegaconf(plain)), text


def test_a_value_in_the_place_of_a_map_is_no_absent_key():
    with pytest.raises(ConfigError, match=r"^b\.d=\[1, 'x'\] stands where keys such as b\.d\.y "):
        looked_up({**ROOT, "x": "${oc.select:b.d.y,1}"})


CYCLE, MISSING = {"y": ["${x}"]}, "???"


@pytest.mark.parametrize(
    "value",
    ["${x}", CYCLE, MISSING, "${oc.select:x,1}", "${none}", "${a}${a}", "\\${a}", "${.a}"],
)
def test_what_has_no_value_or_another_form_is_left_to_omegaconf(value):
    assert looked_up({**ROOT, "x": value}) is None
