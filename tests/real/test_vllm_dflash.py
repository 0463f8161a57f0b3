"""A fitted DFlash drafter in a real vLLM: same text with and without it, and its counters are our decoder's steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.real.test_vllm_eagle3 import EOS, HEAD_DIM, NEW, SEEN, WIDTH, K, V, aux_layers, prompts, write_target
from torchspec_core.decoding.decoder import decode
from torchspec_core.decoding.target import load_target
from torchspec_core.drafters.dflash import FULL, BlockConfig, BlockDrafter, init_blocks
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.slots import Tables
from torchspec_core.evaluation.drafts import open_export
from torchspec_core.evaluation.statistics import engine_steps
from torchspec_core.evaluation.vllm import ServingRequest, measure_in_child
from torchspec_core.export import checkpoint
from torchspec_core.objectives.blocks import block_index
from torchspec_core.objectives.dflash import BlockTeacher, block_loss
from torchspec_core.stages.job import local_job
from torchspec_core.targets.facts import read_facts

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 100


def test_vllm_accepts_what_our_decoder_accepts(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("target", "drafter", "vocabulary", "export", "serving")}
    for name in ("drafter", "vocabulary", "serving"):
        folders[name].mkdir()
    write_target(folders["target"])
    facts = read_facts(folders["target"])
    layers = aux_layers(facts)
    target = load_target(folders["target"], "float32", layers)
    asked = prompts(SEEN, seed=1)
    keys = [str(i) for i in range(len(asked))]
    texts = [
        [*prompt, *row.tokens]
        for prompt, row in zip(asked, decode(target, None, asked, keys=keys, k=0, max_new_tokens=NEW + K), strict=True)
    ]
    config = BlockConfig(
        kind="dflash", hidden_size=WIDTH, num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, intermediate_size=192,
        vocab_size=V, aux_layers=layers, block_size=K + 1, mask_token_id=V - 1, layer_types=(FULL, FULL),
        rms_norm_eps=facts.rms_norm_eps,
        rope=RopeConfig(facts.rope_theta), max_position_embeddings=256,
    )  # fmt: skip
    drafter = BlockDrafter(config)
    init_blocks(drafter, 0)
    lengths = [len(text) for text in texts]
    read = target.prefill(texts, max(lengths)).states.clone()
    aux = torch.cat([read[i, :length] for i, length in enumerate(lengths)])
    ids = torch.tensor([token for text in texts for token in text])
    tables = Tables(target.embedding.detach().clone(), target.head_weight.detach().clone())
    teacher = BlockTeacher(tables, torch.ones(WIDTH), 1e-5)
    target.close()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    numbers = np.random.default_rng(0)
    for _ in range(STEPS):
        anchors = [np.sort(numbers.choice(np.arange(1, length - 1), 12, replace=False)) for length in lengths]
        made = block_index(lengths, np.ones(len(ids), dtype=bool), anchors, K + 1, K, 4.0)
        optimizer.zero_grad()
        block_loss(drafter, teacher, ids, aux, aux[:, :WIDTH], made).loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    save_file(drafter.state_dict(), folders["drafter"] / "drafter.safetensors")
    (folders["drafter"] / "drafter.json").write_text(json.dumps(config.to_json()))
    checkpoint.build(
        local_job(folders["export"], {name: folders[name] for name in ("target", "vocabulary", "drafter")}, {}, {})
    )

    mixed = asked + prompts(12, seed=2)
    opened = open_export(folders["export"], "float32", facts)
    target = load_target(folders["target"], "float32", opened.layers)
    keys = [str(i) for i in range(len(mixed))]
    ours = decode(target, opened.attach(target), mixed, keys=keys, k=K, max_new_tokens=NEW, eos=[EOS])
    target.close()
    served = measure_in_child(
        ServingRequest(
            target=str(folders["target"]), drafter=str(folders["export"]), prompts=mixed, k=K, max_new_tokens=NEW,
            dtype="float32", threads=2, method="dflash",
        ),
        folders["serving"],
        tmp_path / "vllm.log",
    )  # fmt: skip

    assert served.texts == served.plain == [list(row.tokens) for row in ours]
    steps = [engine_steps(len(row.tokens), row.steps, row.after_end, NEW) for row in ours]
    by_slot = tuple(sum(a >= slot for row in steps for a in row) for slot in range(1, K + 1))
    assert served.counters.drafts == sum(map(len, steps))
    assert served.counters.accepted_by_slot == by_slot
    # The comparison means something: every slot accepts some drafts and refuses some.
    assert served.counters.drafts > by_slot[0] > by_slot[1] > by_slot[2] > 0
