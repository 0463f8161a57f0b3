"""Pictures of the attention masks that training uses, drawn by asking the masks themselves about a small example.

    python -m scripts.mask_pictures [--out docs/images]

Writes mask_dense.svg (training-time test, every row drafts), mask_anchored.svg (the same for a few anchors) and
mask_block.svg (DFlash, full and with a sliding window).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from torchspec_core.drafters.blocks import BlockLayout, BlockRule, DenseBlocks
from torchspec_core.drafters.ttt import TTTLayout, dense_ttt_mask
from torchspec_core.plots.masks import Band, MaskPicture, mask_figure
from torchspec_core.plots.style import standalone

LENGTH, DEPTHS, ANCHORS = 8, 3, (2, 5)
BLOCK_LENGTH, BLOCK_ANCHORS, BLOCK_SIZE, WINDOW = 10, (3, 7), 4, 4


def ttt_picture(title: str, rows: Sequence[int]) -> MaskPicture:
    """Training-time test of one document of `LENGTH` rows in which `rows` draft, all depths one below the other."""
    drafted = torch.tensor(rows)
    layout = TTTLayout(
        document=torch.zeros(LENGTH, dtype=torch.int64),
        position=torch.arange(LENGTH),
        rows=drafted,
        rank=torch.arange(len(rows)),
        documents=1,
        width=LENGTH,
        drafted=len(rows),
    )
    width = LENGTH + (DEPTHS - 1) * len(rows)
    visible = np.zeros((DEPTHS * len(rows), width), dtype=bool)
    for depth in range(DEPTHS):
        seen = dense_ttt_mask(layout, depth).numpy()
        visible[depth * len(rows) : (depth + 1) * len(rows), : seen.shape[1]] = seen
    names = tuple(str(row) for row in rows)
    queries = tuple(Band(f"depth {depth}", names) for depth in range(DEPTHS))
    context = Band("keys of depth 0", tuple(map(str, range(LENGTH))))
    return MaskPicture(
        title, visible, queries, (context, *(Band(f"depth {depth}", names, 1) for depth in range(1, DEPTHS)))
    )


def block_picture(title: str, rule: BlockRule) -> MaskPicture:
    """Blocks at `BLOCK_ANCHORS` of one document under a layer's rule."""
    count = len(BLOCK_ANCHORS)
    layout = BlockLayout(
        document=torch.zeros(BLOCK_LENGTH, dtype=torch.int64),
        position=torch.arange(BLOCK_LENGTH),
        block_document=torch.zeros(count, dtype=torch.int64),
        anchor=torch.tensor(BLOCK_ANCHORS),
        rank=torch.arange(count),
        size=BLOCK_SIZE,
        documents=1,
        width=BLOCK_LENGTH,
        drafted=count,
    )
    bands = tuple(Band(f"block at {anchor}", ("a", *("m" * (BLOCK_SIZE - 1))), kind=1) for anchor in BLOCK_ANCHORS)
    context = Band("target's states", tuple(map(str, range(BLOCK_LENGTH))))
    visible = DenseBlocks(layout).visible(rule).flatten(0, 1).numpy()
    return MaskPicture(title, visible, bands, (context, *bands))


def figures() -> dict[str, str]:
    """SVG text by file name."""
    ttt = ("the target's rows at or before", "the row's own drafts")
    blocks = ("the target's states before the anchor", "the block itself (a: anchor's token, m: mask)")
    return {
        "mask_dense.svg": mask_figure([ttt_picture("Dense: every row drafts", range(LENGTH))], ttt),
        "mask_anchored.svg": mask_figure([ttt_picture("Anchored: rows 2 and 5 draft", ANCHORS)], ttt),
        "mask_block.svg": mask_figure(
            [
                block_picture("Full attention", BlockRule()),
                block_picture(f"Sliding window of {WINDOW}", BlockRule(window=WINDOW)),
            ],
            blocks,
        ),
    }


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="pictures of the attention masks")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    folder: Path = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in figures().items():
        (folder / name).write_text(standalone(text), encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
