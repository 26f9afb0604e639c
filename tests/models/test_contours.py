"""Figures: one panel per client and method, with Dice in the titles, and no global state."""

from __future__ import annotations

import sys

import pytest
import torch

from medfed.models.contours import Case, contour_grid
from medfed.models.segmentation_meter import slice_with_most
from tests.models.tiny import make_task


@pytest.fixture
def case():
    truth = torch.zeros(2, 24, 24)
    truth[0, 6:16, 6:16], truth[1, 9:12, 9:12] = 1, 1
    image = torch.zeros(3, 24, 24)  # the first channel is missing
    image[1, 4:20, 4:20] = torch.rand(16, 16)
    return image, truth


def test_grid(case, tmp_path):
    image, truth = case
    cases = {
        "A": Case(image, truth, {"local": truth * 0, "FedAvg": truth}, ("T1", "FLAIR", "T2")),
        "B": Case(image, truth, {"FedAvg": truth}),
    }
    figure = contour_grid(cases, ["whole", "core"])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        *("local\nslice Dice 0.00", "FedAvg\nslice Dice 1.00"),
        *("no model", "slice Dice 1.00"),
    ]
    assert [figure.axes[i].get_ylabel() for i in (0, 2)] == ["A\nFLAIR", "B"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["true", "predicted whole", "predicted core"]
    figure.savefig(tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 1000


def test_background_is_the_first_available_channel_cropped_to_the_body(case):
    image, truth = case
    figure = contour_grid({"A": Case(image, truth, {"m": truth})}, ["whole", "core"])
    shown = figure.axes[0].images[0].get_array()
    assert shown.shape == (20, 20)  # 16 voxels of body and a margin of 2
    assert shown.max() == image[1].max()


def test_the_first_axis_runs_to_the_right_and_the_second_upwards():
    image = torch.ones(1, 30, 20)
    truth = torch.zeros(1, 30, 20)
    image[:, 24:28, 12:18] = truth[:, 24:28, 12:18] = 9  # to the right, and to the front
    image[:, 0, 0] = 0  # all but the corner is body, so that nothing is cut off
    axes = contour_grid({"A": Case(image, truth, {"m": truth})}, ["whole"]).axes[0]
    shown = axes.images[0]
    rows, columns = (shown.get_array() == 9).nonzero()
    assert shown.origin == "lower"
    assert (columns.min(), columns.max(), rows.min(), rows.max()) == (24, 27, 12, 17)
    for contours in axes.collections:  # the true and the predicted one
        line = contours.get_paths()[0].vertices
        assert abs(line.mean(axis=0) - (25.5, 14.5)).max() < 1


def test_empty_and_constant_inputs_are_drawn(case):
    blank, none = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)
    figure = contour_grid({"A": Case(blank, none, {"m": none})}, ["whole"])
    assert figure.axes[0].get_title() == "m\nnothing here"


def test_nothing_to_draw_is_an_error(case):
    with pytest.raises(ValueError, match="at least one client"):
        contour_grid({"A": Case(*case, {})}, ["whole", "core"])


def test_tasks_draw_what_they_can(case):
    image, truth = case
    task = make_task("segmentation")
    assert task.picture({"A": Case(image, truth, {"m": truth})}) is not None
    assert make_task("risk").picture({}) is None


def test_pyplot_is_not_used(case):
    image, truth = case
    contour_grid({"A": Case(image, truth, {"m": truth})}, ["whole", "core"])
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_slice_with_most_labels():
    label = torch.zeros(4, 2, 3, 3)
    label[2, 1], label[1, 0, 0] = 1, 1
    assert slice_with_most(label) == 2
