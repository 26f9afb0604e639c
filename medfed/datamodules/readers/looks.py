"""What a folder or file seems to hold, as readers answer ``medfed init`` beside their formats.

The module of a reader has a function ``looks_like(path, answers)``, which returns a `Guess`, or
None where the path holds something else. It looks at names and first files alone. ``answers`` are
keys that the user has settled, by the command line or by an answer; after new answers it is called
again, so a question may depend on another's answer.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from medfed.datamodules.extending import *
from medfed.datamodules.readers.persons import BEGINNINGS, KNOWN, are_patients
from medfed.datamodules.readers.samples import SPLIT_NAMES
from medfed.datamodules.tables.columns import HOSPITAL, PATIENT
from medfed.standalone import pictures, volumes
from medfed.standalone.csv_files import like_a_number

Answers = Mapping[str, Any]
Taken = Collection[str]
NO = "null: no"
FIRST = 10  # files that are looked into
MANY = 10  # different numbers of a label above which it is a measurement
_MASKS = "seg dseg segmentation segmentations label labels labelstr mask masks maske masken"
INSIDE = {
    *f"{_MASKS} masque msk gt truth groundtruth manual roi wmh annotation annotations".split()
}
COLUMN = "Where one has several, name the column by data.reader.patient=COLUMN."
_PLACE = r"^([^\W\d_]+)[_-]?\d"  # the beginning that may be the hospital
_PLACES = 50  # different texts of a column above which they are no hospitals
_NO_PLACES = {*"mfwd", *("male", "female", "man", "woman", "yes", "no", "true", "false", "y", "n")}
_LABEL = re.compile(r"label|outcome|target|class|y|diagnosis|ill|died|dead|death|event|status")
_CODE = re.compile(r"[^\W\d]*[ _-]?\d[\w-]*")

_YES = {"ja", "oui", "si", "sí", "sì", "sim", "tak", "da", "igen", "evet", "ano", "kyllä", "да"}
_YES |= {"j", "o", "s", "wahr", "vrai", "vero"}
_NO = {"nein", "non", "no", "não", "nao", "nej", "nee", "nei", "nie", "ne", "nem", "hayır", "ei"}
_NO |= {"нет", "n", "falsch", "faux", "falso"}
# Of two labels: those after which the other one is no disease and no event.
_POSITIVE = {"yes", "true", "positive", "pos", "present", "1", "+", "y", "t", "positiv", "positivo"}
_NEGATIVE = {"no", "false", "negative", "neg", "absent", "0", "-", "n", "f", "negativ", "negativo"}


class Question(NamedTuple):
    """What only the owner of the data knows."""

    text: str  # the question
    best: Any = None  # the answer if the user leaves it to medfed; None: there is none
    choices: Sequence[str] = ()  # possible answers, for the user


@dataclass
class Guess:
    """What a folder or file seems to hold."""

    data: str  # the option of ``data=``; empty for the yaml that names the reader
    path: Path  # what ``data.path`` names
    keys: dict[str, Any] = field(default_factory=dict)  # further keys of a run, with their values
    sure: bool = True  # whether the layout tells; of several guesses, those that are sure count
    # What was taken for what: the fact, the value, and how sure that is.
    took: list[tuple[str, object, str]] = field(default_factory=list)
    # The open questions, by the key that answers them.
    asks: dict[str, Question] = field(default_factory=dict)
    refused: DataError | None = None  # names that no reader takes, whatever the answers are

    def reads(self, **values: Any) -> None:
        """Adds keys of the reader."""
        self.keys |= {f"data.reader.{key}": value for key, value in values.items()}

    def ask(self, key: str, text: str, best: Any = None, choices: Sequence[str] = ()) -> None:
        """Adds an open question."""
        self.asks[key] = Question(text, best, choices)

    def check_names(self, sheet: Sheet, column: str) -> None:
        """Refuses names of patients, hospitals or labels that are alike, before any question."""
        of = zip(sheet.numbers, sheet[column], sheet.lacking(column), strict=True)
        cells = [(number, text) for number, text, lacks in of if not lacks]
        try:
            where = f"{sheet.path}, column {column}"
            same([text for _, text in cells], where, lambda at: f"data row {cells[at][0]}")
        except DataError as error:
            self.refused = error

    def ask_names(self, names: Names, answers: Answers, centres: Names | None = None) -> None:
        """Asks whether names begin with the hospital or the patient, where some begin alike."""
        if any(re.match(known, name, re.IGNORECASE) for known in KNOWN.values() for name in names):
            return  # the reader joins them, and says so
        key, places = "data.reader.centre_pattern", list(centres or [""] * len(names))
        if pattern := answers.get(key):
            places = [search_name("centre", str(pattern), n, self.path) for n in names]
        begins = {p: [m[1] for n in names if (m := re.match(p, n))] for p in (_PLACE, *BEGINNINGS)}
        begins = {p: of for p, of in begins.items() if len(of) == len(names) > len({*of})}
        fewest = max(3, len(names) / FIRST)
        person = next((p for p in BEGINNINGS if len({*begins.get(p, ())}) >= fewest), "")
        if person and len({*zip(places, begins[person], strict=True)}) > len({*begins[person]}):
            person = ""  # no patient is at two hospitals
        likely = bool(person) and are_patients(begins[person], places)
        hospitals = (p for p in begins if p == _PLACE or not likely)
        place = next((p for p in hospitals if 1 < len({*begins[p]}) <= len(names) / 2), None)
        if place is not None and centres is not None and not any(places):
            listed = few([*dict.fromkeys(begins[place])], 6)
            text = f"Do the names of cases begin with the hospital ({listed})?"
            self.ask(key, text, "null", (place, NO))
            if not likely and (key not in answers or place == _PLACE):
                return  # a number that is no hospital's may be the patient's
        if person and len({*zip(places, begins[person], strict=True)}) > len({*places}):
            first = Counter(begins[person]).most_common(1)[0][0]
            of = names[begins[person].index(first)]
            text = f"Does the name {of} begin with the patient, {first}?"
            best = person if likely else "null"
            self.ask("data.reader.patient_pattern", text, best, (person, NO))


def visible(path: Path) -> list[Path]:
    """Lists the files and folders in a folder that are not hidden, sorted."""
    return sorted(p for p in path.iterdir() if is_visible(p.name)) if path.is_dir() else []


def words(text: str) -> set[str]:
    """Returns the words of a name."""
    return set(re.split(r"[\W_]+", text.lower()))


def may_be_mask(name: str) -> bool:
    """Says whether a name has a word for a mask.

    Example:
        >>> may_be_mask("*_seg"), may_be_mask("T1")
        (True, False)
    """
    return bool(INSIDE & words(name))


def is_picture(path: Path) -> bool:
    """Says whether a path is a picture."""
    return path.suffix.lower() in pictures.SUFFIXES and path.is_file()


@lru_cache(8)  # several readers look at it
def _read(path: Path, changed: int) -> Sheet:
    return Sheet.read(path)


def sheet_of(path: Path) -> Sheet:
    """Reads a table as often as it has changed."""
    return _read(path, path.stat().st_mtime_ns)


def sheet_of_entries(path: Path, entries: Sequence[Mapping[str, Any]]) -> Sheet:
    """Returns the texts and whole numbers of a list's entries as a table."""
    columns = sorted({k for e in entries for k, v in e.items() if isinstance(v, str | int)})
    cells = {column: [str(e.get(column, "")).strip() for e in entries] for column in columns}
    return Sheet(path, cells, range(1, len(entries) + 1))


def distinct(sheet: Sheet) -> dict[str, set[str]]:
    """Returns the different texts of each column, without missing cells."""
    return {c: {text for text in sheet.texts(c) if text is not None} for c in sheet.columns}


def index_of(path: Path) -> tuple[Sheet, list[str]] | None:
    """Finds a CSV that names pictures, and its columns of them; those of masks come last."""
    files = [path] if path.is_file() else path.glob("*.csv")
    for file in sorted(files, key=lambda f: (f.name != "images.csv", f.name)):
        if file.suffix.lower() not in (".csv", ".tsv", ".txt") or file.name == "centres.csv":
            continue
        sheet = sheet_of(file)
        cells = slashed(file.parent, (of[0] for of in sheet.cells.values()))
        first = zip(sheet.columns, cells, strict=True)
        if named := [column for column, cell in first if is_picture(file.parent / cell)]:
            return sheet, sorted(named, key=may_be_mask)
    return None


def files_in(sheet: Sheet, column: str, name: str = "{}") -> list[Path]:
    """Returns the files that the cells of a column name, from the folder of the table on."""
    folder, files = sheet.path.parent, [name.replace("{}", text) for text in sheet[column]]
    return [folder / file for file in slashed(folder, files)]


def roles(guess: Guess, sheet: Sheet, prefix: str, answers: Answers, taken: Taken) -> None:
    """Takes columns for hospitals and patients by their names, or asks whether one is."""
    texts = {c: of for c, of in distinct(sheet).items() if c not in taken and len(of) > 1}
    rows = len(sheet)
    places = [c for c, of in texts.items() if _may_be_places(c, of, rows)]
    people = [c for c, of in texts.items() if rows > len(of) > rows / FIRST and _are_codes(of)]
    for role, pattern, others, question in (
        ("centre", HOSPITAL, places, "name the hospital? Without it, clients are random."),
        ("patient", PATIENT, people, "identify the patient? Without it, each row is one."),
    ):
        key = f"{prefix}{role}"
        named = [c for c in texts if pattern.fullmatch(c)]
        if (column := answers.get(key, named[0] if len(named) == 1 else None)) in texts:
            guess.check_names(sheet, column)
        if key in answers:
            continue
        if len(named) == 1:
            guess.keys[key] = named[0]
            guess.took.append((role, named[0], "probably: its name"))
        elif choices := named or [c for c in others if c not in guess.keys.values()]:
            text = f"Does one of these columns {question}"
            guess.ask(key, text, named[0] if named else "null", (*choices, NO))


def sites_of(guess: Guess, names: Names, answers: Answers) -> list[str]:
    """Asks whether a table in the folder names the hospitals of cases; returns these if it does."""
    key, tables, cases = "data.reader.sites.file", dict[Path, dict[str, Any]](), {*map(fold, names)}
    for file in visible(guess.path):
        if file.suffix.lower() not in (".csv", ".tsv"):
            continue
        columns = {c: [*map(fold, cells)] for c, cells in sheet_of(file).cells.items()}
        case = next((c for c, of in columns.items() if 2 * len(cases & {*of}) > len(cases)), None)
        places = [c for c in columns if HOSPITAL.fullmatch(c) or c.lower().startswith("partition")]
        if case and places:
            splits = (c for c, of in columns.items() if {*map(str.lower, of)} <= {*SPLIT_NAMES})
            tables[file.resolve()] = {
                "case": case,
                "centre": places[0],
                "split": next(splits, None),
            }
    if tables:
        listed = few([f"{file.name} by {of['centre']}" for file, of in tables.items()], 6)
        text = f"Which table names the hospitals of cases: {listed}?"
        choices = [*map(str, tables)]
        guess.ask(key, text, choices[0], (*choices, NO))
    file = Path(str(answers.get(key))).expanduser().resolve()
    if (of := tables.get(file)) is None:
        return []
    guess.reads(**{f"sites.{role}": column for role, column in of.items()})
    sheet = sheet_of(file)
    place = dict(zip(map(fold, sheet[of["case"]]), sheet[of["centre"]], strict=True))
    return [place.get(fold(name), "") for name in names]


def label_of(guess: Guess, sheet: Sheet, key: str, answers: Answers, taken: Taken) -> str | None:
    """Returns the column that is the label by its name, or asks for it."""
    kinds = distinct(sheet)
    alike = [c for c in sheet.columns if _LABEL.fullmatch(c.lower()) and c not in taken]
    label: str | None = answers.get(key, alike[0] if len(alike) == 1 else None)
    few_texts = [c for c, of in kinds.items() if 2 <= len(of) <= MANY and c not in taken]
    guess.ask(key, "Which column is the label?", label, alike or few_texts)
    if label in kinds:
        guess.check_names(sheet, label)
    return label


def which_is_yes(names: Sequence[str]) -> str | None:
    """Of two labels in another language than English, the one that means yes, if the other is no.

    Example:
        >>> which_is_yes(["Ja", "Nein"]), which_is_yes(["no", "yes"]), which_is_yes(["a", "b"])
        ('Ja', None, None)
    """
    lower = [name.lower() for name in names]
    if len(names) != 2 or not ({*lower} & _YES and {*lower} & _NO):
        return None
    return names[0] if lower[0] in _YES else names[1]


def is_plainly_positive(names: Sequence[str]) -> bool:
    """Says whether the second of two sorted labels is the positive class by its word.

    Example:
        >>> is_plainly_positive(["0", "1"]), is_plainly_positive(["alive", "dead"])
        (True, False)
    """
    no, yes = (name.lower() for name in names)
    return (no in _NEGATIVE and yes in _POSITIVE) or all(map(like_a_number, names))


def _may_be_places(name: str, texts: Collection[str], rows: int) -> bool:
    """Whether a column's name says so, or it has few texts that are no sexes and no answers."""
    if any(map(HOSPITAL.fullmatch, words(name))):
        return True
    several = 2 <= len(texts) <= _PLACES and 4 * len(texts) <= rows
    known = {*map(str.lower, texts)} <= _NO_PLACES or which_is_yes(sorted(texts)) is not None
    return several and not known and not any(map(like_a_number, texts))


def _are_codes(texts: Collection[str]) -> bool:
    """Whether texts are like P001, and no numbers or dates."""
    return all(map(_CODE.fullmatch, texts)) and not any(map(like_a_number, texts))


def colours(guess: Guess, files: Sequence[Path], compare: bool = False) -> None:
    """Notes the colours and size of the first pictures; says which channels are copies."""
    heads = [pictures.picture_header(file) for file in files[:FIRST]]
    color = "rgb" if any(color == "rgb" for _, _, color in heads) else "grey"
    guess.reads(color=color)
    guess.took.append(("first picture", heads[0], "sure: its header"))
    some = files[:: 1 + len(files) // 100] if compare and color == "rgb" else []
    pairs = Counter[str]()
    for file in some:
        of = zip(("red", "green", "blue"), pictures.read_picture(file, "rgb")[0], strict=True)
        pairs.update(f"{a} = {b}" for (a, x), (b, y) in combinations(of, 2) if (x == y).all())
    if pairs:
        equal = f"{few([f'{pair} in {n}' for pair, n in pairs.items()])} of {len(some)} pictures"
        guess.took.append(("equal channels", equal, "perhaps a copy for a contrast not taken"))


def regions(guess: Guess, files: Sequence[Path], white: bool = False) -> None:
    """Notes the values of the first masks, and asks for the regions if they are BraTS's."""
    values: set[int] = set()
    for file in files[:FIRST]:
        flat = is_picture(file)
        voxels = pictures.read_mask(file) if flat else volumes.read_volume(file).voxels.numpy()
        values |= {int(v) for v in np.unique(voxels) if v}
    inside = sorted(values)
    if not 0 < len(inside) < 50 or not 0 < inside[0] <= inside[-1] < 256:
        raise DataError(f"{files[0]} is no mask of a few label values; name it by data.reader.")
    called = {"foreground" if len(inside) == 1 else f"label_{v}": [v] for v in inside}
    guess.reads(regions=None if white and inside in ([1], [255]) else called)
    guess.took.append(("mask values", inside, "in the first masks; data.reader.regions"))
    if inside == [1, 2, 4]:
        brats = {"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]}
        text = "The masks hold 1, 2 and 4, as those of BraTS. Which regions?"
        choices = [str(of).replace("'", "") for of in (brats, called)]
        guess.ask("data.reader.regions", text, brats, choices)


def brats_regions() -> Question:
    """Asks for the regions of a tumour in the layout of BraTS."""
    regions = ["whole", "core", "enhancing"]
    return Question("Which regions of the tumour? They overlap.", regions, regions)


def several(data: str, path: Path, files: Sequence[Path]) -> Guess:
    """Returns the guess that one of several files is meant, and asks which."""
    question = Question(f"Which of the {len(files)} files?", None, [f.name for f in files])
    return Guess(data, path, sure=False, asks={"data.path": question})
