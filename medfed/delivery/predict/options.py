"""What a prediction is asked for, where it writes, and how it works through many inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from medfed.common.console import Steps
from medfed.standalone.checks import check_count, check_fields, check_not_negative, within
from medfed.standalone.errors import ConfigError, DataError, MedfedError, WriteError, first_line
from medfed.standalone.masks import NIFTI, SEG

Item = TypeVar("Item")


@dataclass(frozen=True)
class PredictOptions:
    """The keys of ``configs/predict.yaml``, described there."""

    bundle: str
    input: str
    output: str
    candidates: str | None = None
    format: Literal["nifti", "dicomseg"] | None = None
    probabilities: bool = False
    picture: bool = False
    overwrite: bool = False
    spacing_tolerance: Annotated[float | None, check_not_negative] = 0.25
    threshold: Annotated[float | None, within("[0, 1)")] = None
    batch_size: Annotated[int, check_count] = 16
    backend: Literal["torch", "onnx"] = "torch"
    device: str | None = None
    plugins: Sequence[str] | None = None  # named, so that a network's own code may be used

    def __post_init__(self) -> None:
        for key in ("bundle", "input", "output"):  # as of a shell's variable that is not set
            if not str(getattr(self, key)).strip():
                raise ConfigError(f"{key} is empty; name a file or folder.")
        check_fields("", self)

    @property
    def into_folder(self) -> bool:
        """Whether the output is a folder: one that is there, or a name without a suffix.

        Example:
            >>> PredictOptions("a", "b", "masks").into_folder
            True
            >>> PredictOptions("a", "b", "mask.nii.gz").into_folder
            False
        """
        path = Path(self.output)
        return path.is_dir() or self.output.endswith(("/", "\\")) or not path.suffix


def attempt(
    items: Sequence[Item],
    work: Callable[[Item], None],
    what: str,
    report: Callable[[], None],
    name: Callable[[Item], str],
    failed: Callable[[Item, str], None] = lambda _, __: None,
    again: str = "nothing was written; run it again.",
) -> None:
    """Works through items with a progress bar; a bad one does not stop the others.

    What stops all of them alike, such as a full disk, ends the work.
    """
    errors: list[str] = []
    with Steps(len(items), quiet=len(items) == 1, verb="predict") as steps:
        for item in items:
            try:
                work(item)
            except KeyboardInterrupt as error:
                how = again.format(done=steps.done - len(errors), all=len(items))
                raise type(error)(how) from error
            except Exception as error:
                if isinstance(error, WriteError):
                    raise
                known = isinstance(error, MedfedError)
                odd = f"{name(item)}: unexpected {type(error).__name__}: {first_line(error)}."
                errors.append(str(error) if known else odd)
                failed(item, errors[-1])
                if len(items) == 1:
                    raise
            steps.advance(name(item))
    report()
    for one in errors:
        print(f"error: {one}", file=sys.stderr)
    if errors:
        raise DataError(
            f"{len(errors)} of {len(items)} {what} could not be predicted, for the reasons above"
            + ("; the others are done." if len(errors) < len(items) else ".")
        )


def check_place(options: PredictOptions) -> None:
    """Refuses an output that would be in the way of what is there; parents may be missing.

    Example:
        >>> check_place(PredictOptions("bundle", "scans", "no/such/folder/masks"))
    """
    output = Path(options.output).absolute()
    if output.resolve() == Path(options.input).resolve():
        raise ConfigError(f"output={options.output} is the input; choose another one.")
    if output.resolve().is_relative_to(Path(options.bundle).resolve()):
        raise ConfigError(f"output={output} lies in bundle={options.bundle}; choose another.")
    above = next(p for p in output.parents if p.exists())
    for path in (output, above):
        is_wanted = options.into_folder if path == output else True
        if path.exists() and is_wanted and not path.is_dir():
            raise ConfigError(f"{path} is a file and no folder; choose another output.")


def check_targets(targets: Iterable[Path], overwrite: bool, inputs: Iterable[Path]) -> None:
    """Refuses to write over an input, or over what is there."""
    sources = {path.resolve() for path in inputs}
    for target in targets:
        if target.resolve() in sources:
            raise ConfigError(f"The output {target} is an input; choose another output.")
        if target.exists() and not overwrite:
            raise ConfigError(f"{target} is there already; set overwrite=true to replace it.")


def table_path(options: PredictOptions) -> Path:
    """Returns the CSV file that will be written: the output itself, or one in it.

    Example:
        >>> table_path(PredictOptions("bundle", "patients.csv", "probabilities.csv")).name
        'probabilities.csv'
        >>> table_path(PredictOptions("bundle", "images", "results")).as_posix()
        'results/predictions.csv'
    """
    output = Path(options.output)
    if options.into_folder:
        output /= "predictions.csv"
    elif output.suffix.lower() != ".csv":
        raise ConfigError(f"output={output} is no .csv file or folder: this model writes a table.")
    inputs = [Path(path) for path in (options.input, options.candidates) if path is not None]
    check_targets([output], options.overwrite, inputs)
    return output


def check_writable(path: Path, wanted: str | None, what: str) -> None:
    """Refuses a mask's file of a format that is not written, or not the one that is wanted."""
    every: dict[str | None, tuple[str, ...]]
    every = {"nifti": NIFTI, "dicomseg": (SEG,), "png": (".png",)}
    kinds = every.get(wanted, (*NIFTI, SEG))
    if not path.name.lower().endswith(kinds):
        by = f" with format={wanted}" * (wanted in ("nifti", "dicomseg"))
        raise ConfigError(
            f"output={path} must be a folder, or a file of {', '.join(kinds)}{by} where the input "
            f"is one {what}."
        )
