"""The peer's side of `benchmarks.training`: speculators' EAGLE-3 model and loss, on batches that another process made.

    PYTHONPATH=PEER python -m benchmarks.training_peer FOLDER

Runs where `speculators` 0.9.0 can be imported, which this project's environment is not. Its trainer cannot run
without an accelerator, so: its model, its `kl_div` loss (eager form), its alignment, a plain loop with what its trainer
uses (bf16 autocast over fp32 weights, AdamW 1e-3 with weight decay 0.01, clip 1.0), SDPA with a dense mask. Each line
on standard input is an index of a batch or `pause`; each is answered with a JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def build(described: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    """Their model with our weights, fp32; head and embedding frozen, as it comes."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(**described["layer"], num_hidden_layers=1, attention_bias=False, tie_word_embeddings=False)
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=described["draft_vocab_size"],
        norm_before_residual=described["norm_before_residual"],
        eagle_aux_hidden_state_layer_ids=described["aux_layers"],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=described["depths"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model: nn.Module = Eagle3DraftModel(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or not {*missing} <= {"t2d", "d2t"}:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    return model


def shifted(batch: dict[str, Any]) -> dict[str, Tensor]:
    """A packed batch, each document aligned as their data loader does it: (x_{t+1}, g_t, y_{t+1}, l_{t+1})."""
    parts: dict[str, list[Tensor]] = {"ids": [], "aux": [], "last": [], "mask": [], "document": []}
    start = 0
    for number, length in enumerate(batch["lengths"]):
        late, early = slice(start + 1, start + length), slice(start, start + length - 1)
        parts["ids"].append(batch["ids"][late])
        parts["aux"].append(batch["aux"][early])
        parts["last"].append(batch["last"][late])
        parts["mask"].append(batch["mask"][late])
        parts["document"].append(torch.full((length - 1,), number))
        start += length
    return {name: torch.cat(values).unsqueeze(0) for name, values in parts.items()}


def main(folder: Path) -> int:
    """Serve steps until standard input ends."""
    from speculators.losses import resolve_loss_config

    given = torch.load(folder / "peer.pt", weights_only=True)
    model = build(given["described"], given["weights"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, fused=True)
    loss_config = resolve_loss_config("kl_div", "eager")
    depths = given["described"]["depths"]
    for line in sys.stdin:
        started = time.perf_counter()
        batch = shifted(given["batches"][int(line)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, metrics = model(
                hidden_states=batch["aux"],
                input_ids=batch["ids"],
                document_ids=batch["document"],
                loss_mask=batch["mask"],
                verifier_last_hidden_states=batch["last"],
                ttt_steps=depths,
                ttt_step_loss_decay=1.0,
                loss_config=loss_config,
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        answer = {"seconds": time.perf_counter() - started, "loss": float(loss.detach())}
        answer |= {name: float(value) for name, value in metrics.items() if "full_acc" in name or "loss_" in name}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
