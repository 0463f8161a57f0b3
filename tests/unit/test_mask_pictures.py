"""The mask pictures show what the definitions say, square by square."""

from __future__ import annotations

import re

import pytest

from scripts import mask_pictures as pictures
from torchspec_core.drafters.blocks import BlockRule


@pytest.mark.parametrize("rows", [list(range(pictures.LENGTH)), list(pictures.ANCHORS)])
def test_ttt_squares_by_hand(rows: list[int]) -> None:
    picture = pictures.ttt_picture("", rows)
    places = [(depth, row) for depth in range(pictures.DEPTHS) for row in rows]
    keys = [(0, j) for j in range(pictures.LENGTH)] + [(e, row) for e in range(1, pictures.DEPTHS) for row in rows]
    for q, (depth, row) in enumerate(places):
        for k, (made, key) in enumerate(keys):
            seen = key <= row if made == 0 else key == row and made <= depth
            assert picture.visible[q, k] == seen
    assert sum(len(band.labels) for band in picture.keys) == picture.visible.shape[1]
    assert sum(len(band.labels) for band in picture.queries) == picture.visible.shape[0]


@pytest.mark.parametrize("window", [None, 4])
def test_block_squares_by_hand(window: int | None) -> None:
    picture = pictures.block_picture("", BlockRule(window=window))
    slots = [(block, anchor + n) for block, anchor in enumerate(pictures.BLOCK_ANCHORS) for n in range(4)]
    for q, (block, position) in enumerate(slots):
        for k in range(picture.visible.shape[1]):
            own, key = (None, k) if k < pictures.BLOCK_LENGTH else slots[k - pictures.BLOCK_LENGTH]
            seen = key < pictures.BLOCK_ANCHORS[block] if own is None else own == block
            assert picture.visible[q, k] == (seen and (window is None or abs(position - key) < window))


def test_a_figure_has_a_square_for_each_visible_key() -> None:
    text = pictures.figures()["mask_anchored.svg"]
    visible = pictures.ttt_picture("", pictures.ANCHORS).visible
    # Each filled square is one path in a drawing colour; the legend adds one of each of the two.
    assert len(re.findall(r'style="fill: #(?:3b82c4|d9822b)', text)) == int(visible.sum()) + 2
