"""Our drafters against other projects' on identical weights. `make peers` installs those projects and runs this.

Each peer computes in a process of its own, since their dependencies are not ours. What differs between the projects by
convention alone is converted here: they divide a loss by the supervised slots, we by the sum of the slots' weights.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.peers import tiny
from torchspec_core.drafters.dflash import BlockConfig, BlockDrafter
from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.slots import Tables
from torchspec_core.objectives.blocks import block_index
from torchspec_core.objectives.dflash import BlockTeacher, block_loss
from torchspec_core.objectives.eagle3 import embed_rows
from torchspec_core.objectives.ttt import ttt_index

# Each test starts a process that imports a large project.
pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".torchspec" / "peers"  # where `make peers` installs requirements/peers.txt
DATA = tiny.inputs()
SHAPE: dict[str, Any] = {
    "hidden_size": tiny.SIZE,
    "num_heads": tiny.HEADS,
    "num_kv_heads": tiny.KV_HEADS,
    "head_dim": tiny.HEAD_DIM,
    "intermediate_size": tiny.MLP,
    "vocab_size": tiny.VOCAB,
    "aux_layers": (1, 3, 5),
    "rms_norm_eps": tiny.EPS,
    "rope": RopeConfig(theta=tiny.THETA),
}


def theirs(peer: str, case: str, folder: Path) -> dict[str, Any]:
    if not (PEERS / peer).is_dir():
        pytest.skip(f"{peer} is not installed: make peers")
    environment = {**os.environ, "PYTHONPATH": str(PEERS), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, str(ROOT / "tests/peers/run.py"), peer, case, str(folder / "out.pt")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    values: dict[str, Any] = torch.load(folder / "out.pt")
    return values


def our_eagle_logits() -> Tensor:
    config = Eagle3Config(**SHAPE, target_hidden_size=tiny.SIZE, draft_vocab_size=tiny.VOCAB)
    drafter = Eagle3Drafter(config)
    drafter.load_state_dict(tiny.eagle_weights())
    every = np.ones(tiny.LENGTH, dtype=bool)
    index = ttt_index([tiny.LENGTH], every, tiny.DEPTHS, rows=np.arange(tiny.LENGTH))
    embeds = [embed_rows(DATA.embedding, DATA.ids, following) for following in index.next_token]
    return torch.stack([drafter.logits(out) for out in drafter.rollout(DATA.aux, embeds, index.layout)])


def our_blocks(dspark: bool) -> tuple[BlockDrafter, Tensor, Tensor, int]:
    """(drafter, hidden [M, P, H], loss, predictions P of a block)."""
    config = BlockConfig(
        **SHAPE,
        kind="dspark" if dspark else "dflash",
        block_size=tiny.BLOCK,
        mask_token_id=tiny.MASK_TOKEN,
        markov_rank=tiny.RANK if dspark else None,
    )
    drafter = BlockDrafter(config)
    drafter.load_state_dict(tiny.block_weights(dspark))
    every = np.ones(tiny.LENGTH, dtype=bool)
    anchors = [np.array(tiny.ANCHORS)]
    index = block_index([tiny.LENGTH], every, anchors, tiny.BLOCK, config.predictions, tiny.GAMMA)
    ids = torch.full((len(tiny.ANCHORS), tiny.BLOCK), tiny.MASK_TOKEN)
    ids[:, 0] = DATA.ids[list(tiny.ANCHORS)]
    hidden = drafter(DATA.aux, DATA.embedding[ids], index.layout)
    teacher = BlockTeacher(Tables(DATA.embedding, DATA.head), DATA.target_norm, tiny.EPS)
    loss = block_loss(drafter, teacher, DATA.ids, DATA.aux, DATA.last, index).loss
    return drafter, hidden, loss, config.predictions


@pytest.mark.parametrize("peer", ["speculators", "specforge", "nemo_automodel"])
def test_eagle3_logits_over_three_depths(peer: str, tmp_path: Path) -> None:
    with torch.no_grad():
        ours = our_eagle_logits()
    whole = tiny.LENGTH - tiny.DEPTHS  # rows whose tokens are known at every depth
    got = theirs(peer, "eagle3", tmp_path)["logits"]
    assert ours.abs().max() > 1
    torch.testing.assert_close(ours[:, :whole], got[:, :whole], atol=1e-5, rtol=0)


@pytest.mark.parametrize("peer", ["speculators", "specforge", "nemo_automodel"])
@pytest.mark.parametrize("case", ["dflash", "dspark"])
def test_block_hidden_states_heads_and_losses(peer: str, case: str, tmp_path: Path) -> None:
    with torch.no_grad():
        drafter, hidden, loss, predictions = our_blocks(case == "dspark")
    got = theirs(peer, case, tmp_path)
    slots = got["hidden"].view(len(tiny.ANCHORS), tiny.BLOCK, tiny.SIZE)
    torch.testing.assert_close(hidden, slots[:, tiny.BLOCK - predictions :], atol=1e-5, rtol=0)
    if "scores" in got:
        before = DATA.ids[(torch.tensor(tiny.ANCHORS).unsqueeze(1) + torch.arange(tiny.BLOCK)).flatten()]
        with torch.no_grad():
            scores, _ = drafter.scores(hidden.flatten(0, 1), before, Tables(DATA.embedding, DATA.head))
            confidence = drafter.confidence_head(hidden.flatten(0, 1), drafter.markov_head.features(before))
        torch.testing.assert_close(scores, got["scores"], atol=1e-5, rtol=0)
        torch.testing.assert_close(confidence, got["confidence"], atol=1e-5, rtol=0)
    if "loss" in got:
        weights = sum(math.exp(-n / tiny.GAMMA) for n in range(predictions))
        assert loss.item() == pytest.approx(got["loss"].item() * predictions / weights, rel=1e-5)
