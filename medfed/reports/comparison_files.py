"""What a comparison leaves behind: a table, a report and pictures in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from medfed.federation.callbacks.evaluation import smaller_is_better
from medfed.models.pictures import contour_grid
from medfed.personalize.pictures import coupling_path
from medfed.reports.bits_path import BitsPath, bits_paths, has_bits, partners
from medfed.reports.bits_path import to_csv as bits_to_csv
from medfed.reports.bits_picture import draw_bits
from medfed.reports.communication import Communication, communication
from medfed.reports.communication_pictures import draw_communication
from medfed.reports.comparison import Comparison, compare
from medfed.reports.comparison_pictures import client_dots, cost_scatter, label_of, method_curves
from medfed.reports.comparison_report import print_table, to_csv, to_markdown
from medfed.reports.count_path import CountPath, count_paths
from medfed.reports.count_path import to_csv as counts_to_csv
from medfed.reports.count_picture import draw_counts
from medfed.reports.lambda_path import LambdaPath, lambda_path
from medfed.reports.pictures import load_cases, save_figures
from medfed.reports.results import wide_console
from medfed.reports.runs import common_folder, find_runs
from medfed.run_folder import write_text

_CAPTIONS = {
    "clients": "Test metric of every client under every method.",
    "bytes": "Mean test metric against the bytes that travelled.",
    "validation": "Validation metric against the round.",
    "contours": "One test slice per client, true and predicted contours of every method.",
    "lambda_path": "Personal models as the coupling λ grows, after their last round; the metric "
    "is that of the selected round.",
    "canonical_count": "Test metric against the number of canonical models, a point per seed.",
    "bits": "Test metric against the bits per quantised weight, a point per seed.",
    "communication_gamma": "Bytes per round in both directions and the test metric against γ.",
    "communication_curves": "Validation metric against rounds and against the bytes until then.",
    "communication_clients": "What each client saved against dense fp32.",
    "communication_front": "Test metric against bytes, and the methods that none beats in both.",
}


def compare_runs(
    runs: str | Sequence[str], out: Path | None = None, metric: str | None = None
) -> Comparison:
    """Compares runs, prints the table and writes ``comparison.csv``, ``.md`` and pictures.

    Args:
        runs: Run folders, or folders that hold runs.
        out: Where to write; ``None`` takes the folder that holds all runs.
        metric: The metric of the pictures; ``None`` takes the one that selected the rounds.

    Returns:
        The comparison.

    Raises:
        MedfedError: If the runs cannot be read or compared.
    """
    folders = find_runs(runs)
    comparison = compare(folders, metric)
    path, sweep = lambda_path(comparison), communication(comparison)
    counts, bits = count_paths(comparison), bits_paths(comparison)
    folder = common_folder(folders) if out is None else out.expanduser()
    pictures = save_figures(folder, figures(comparison, path, sweep, counts, bits))
    captions = {_CAPTIONS[name]: file for name, file in pictures.items()}
    write_text(folder / "comparison.csv", to_csv(comparison))
    paragraphs = []
    if path is not None:
        write_text(folder / "lambda_path.csv", path.to_csv())
        paragraphs = [path.describe()]
    if counts:
        write_text(folder / "canonical_count.csv", counts_to_csv(counts))
        paragraphs += [c.describe() for c in counts]
    if bits:
        write_text(folder / "bits.csv", bits_to_csv(bits))
        paragraphs += [b.describe() for b in bits]
    paragraphs += [p.describe(comparison.metric) for p in partners(comparison)]
    if sweep is not None:
        write_text(folder / "communication.csv", sweep.to_csv())
        write_text(folder / "communication_front.csv", sweep.front_csv())
        paragraphs += sweep.describe()
    write_text(folder / "comparison.md", to_markdown(comparison, captions, paragraphs))
    console = wide_console()
    print_table(comparison, console)
    for line in (*paragraphs, f"Report and pictures: {folder}"):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return comparison


def figures(
    comparison: Comparison,
    path: LambdaPath | None = None,
    sweep: Communication | None = None,
    counts: Sequence[CountPath] = (),
    bits: Sequence[BitsPath] = (),
) -> dict[str, Figure | None]:
    """Draws all pictures of a comparison; None stands where there is nothing to draw.

    Args:
        comparison: The methods and their runs.
        path: The λ path, where there is one.
        sweep: The sweep over codecs and channels, where there is one.
        counts: The paths over the number of canonical models.
        bits: The paths over the bits per weight.
    """
    methods, metric = comparison.methods, comparison.metric
    values = {
        m.name: {c: [r.summary["clients"][c][metric] for r in m.runs] for c in comparison.clients}
        for m in methods
    }
    points = {
        m.name: [
            (sum(r.summary["bytes"].values()), r.summary["federation"][metric]["mean"])
            for r in m.runs
        ]
        for m in methods
    }
    histories = {m.name: [r.history() for r in m.runs] for m in methods}
    cases = load_cases({m.name: m.runs[0].folder for m in methods})
    regions = list(methods[0].runs[0].config.regions)
    return {
        "lambda_path": None if path is None else draw_path(path),
        "clients": client_dots(values, metric),
        "validation": method_curves(histories, metric, smaller_is_better(metric)),
        "bytes": cost_scatter(points, metric),
        "contours": contour_grid(cases, regions) if cases else None,
        "canonical_count": draw_count_paths(comparison, counts) if counts else None,
        "bits": draw_bits(bits, unquantised(comparison)) if bits else None,
        **({} if sweep is None else draw_communication(sweep)),
    }


def draw_count_paths(comparison: Comparison, paths: Sequence[CountPath]) -> Figure:
    """Draws the paths over K beside the methods that have no canonical models."""
    metric = comparison.metric
    others = {
        m.name: (m.federation(metric, "mean").value, m.federation(metric, "worst").value)
        for m in comparison.methods
        if "memberships" not in m.runs[0].summary
    }
    return draw_counts(paths, others)


def unquantised(comparison: Comparison) -> dict[str, tuple[float, float]]:
    """Returns mean and worst client of the methods that have no number of bits."""
    metric = comparison.metric
    return {
        m.name: (m.federation(metric, "mean").value, m.federation(metric, "worst").value)
        for m in comparison.methods
        if not has_bits(m)
    }


def draw_path(path: LambdaPath) -> Figure:
    """Draws the λ path."""
    places, variance = path.components()
    return coupling_path(
        path.strengths,
        places,
        variance,
        path.coupling,
        path.scores,
        score_label=f"test {label_of(path.metric)},\nmean over clients",
        end_label=f"{'consensus' if path.is_consensus() else 'mean'} at λ = {path.strengths[-1]:g}",
        p=path.p,
        shares=path.shares,
    )
