"""An exported EAGLE-3 drafter in a real vLLM: it loads, changes no token, and is accepted as our decoder says, slot
by slot.

The target is a tiny random Llama; the drafter is fitted here to the target's own greedy texts for a few seconds, so
that it is right sometimes. One child process starts vLLM twice (without and with the drafter) for the whole module.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from torchspec_core.decoding.decoder import Decoded, decode
from torchspec_core.decoding.draft import Eagle3Chain
from torchspec_core.decoding.target import CachedTarget, load_target
from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, init_weights
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.evaluation.statistics import acceptance, engine_steps
from torchspec_core.evaluation.vllm import ServingRequest, ServingResult, measure_in_child
from torchspec_core.export.checkpoint import export_eagle3, load_drafter
from torchspec_core.report.document import serve_command
from torchspec_core.targets.facts import aux_layers, read_facts

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

V, V_D, K, NEW, EOS = 128, 96, 3, 40, 1
SEEN = 12  # prompts of the comparison that the drafter was fitted to
LAYERS, WIDTH, HEAD_DIM = 8, 128, 32


def write_target(folder: Path) -> None:
    """8 layers, width 128, heads of 32; weights wide enough that greedy texts wander instead of repeating one token."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=WIDTH,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        initializer_range=0.12,
        rope_theta=5000.0,
        bos_token_id=0,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def prompts(count: int, seed: int) -> list[list[int]]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(2, V, size=int(numbers.integers(1, 14))).tolist() for _ in range(count)]


def fit(drafter: Eagle3Drafter, target: CachedTarget, d2t: torch.Tensor, texts: list[list[int]], steps: int) -> None:
    """Chains of K drafts from random places of the texts, each step fed the true tokens, as at inference."""
    length = min(map(len, texts))
    ids = torch.tensor([text[:length] for text in texts])
    states = target.prefill(ids.tolist(), length).states.clone()
    embedding = target.embedding.clone()
    draft_of = torch.full((V,), -100)
    draft_of[d2t + torch.arange(len(d2t))] = torch.arange(len(d2t))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    numbers = torch.Generator().manual_seed(0)
    columns = torch.arange(length - 1)
    rows = torch.arange(len(ids))
    for _ in range(steps):
        last = torch.randint(0, length - K - 1, (len(ids),), generator=numbers)
        cache = drafter.new_cache(len(ids), length)
        positions = torch.where(columns <= last.unsqueeze(1), columns, -1)
        out = drafter.step(drafter.combine(states[:, :-1]), embedding[ids[:, 1:]], positions, cache)
        whole = torch.nn.functional.cross_entropy(
            drafter.logits(out)[:, :-1].flatten(0, 1),
            torch.where(positions[:, :-1] >= 0, draft_of[ids[:, 2:]], -100).flatten(),
        )
        hidden, loss = out[rows, last], whole
        for k in range(K):
            loss = loss + torch.nn.functional.cross_entropy(drafter.logits(hidden), draft_of[ids[rows, last + 2 + k]])
            if k < K - 1:
                cache = replace(cache, k=cache.k.clone(), v=cache.v.clone())  # autograd keeps what was written before
                hidden = drafter.step(
                    hidden.unsqueeze(1),
                    embedding[ids[rows, last + 2 + k]].unsqueeze(1),
                    (last + 1 + k).unsqueeze(1),
                    cache,
                )[:, 0]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()


@dataclass(frozen=True)
class Case:
    folder: Path
    prompts: list[list[int]]
    ours: list[Decoded]
    plain: list[Decoded]
    served: ServingResult


def decode_exported(folder: Path, export: Path, asked: list[list[int]]) -> list[Decoded]:
    drafter, d2t, _ = load_drafter(export, "float32", read_facts(folder / "target"))
    target = load_target(folder / "target", "float32", drafter.config.aux_layers)
    rows = decode(
        target,
        Eagle3Chain(drafter, target.embedding, d2t),
        asked,
        keys=[str(i) for i in range(len(asked))],
        k=K,
        max_new_tokens=NEW,
        eos=[EOS],
    )
    target.close()
    return rows


def fitted_export(folder: Path) -> list[list[int]]:
    """Write `target` and a fitted, exported drafter (`export`) to `folder`; the prompts that it was fitted to."""
    write_target(folder / "target")
    facts = read_facts(folder / "target")
    layers = aux_layers(facts)
    target = load_target(folder / "target", "float32", layers)
    asked = prompts(48, seed=1)
    keys = [str(i) for i in range(len(asked))]
    texts = [
        [*prompt, *row.tokens]
        for prompt, row in zip(asked, decode(target, None, asked, keys=keys, k=0, max_new_tokens=NEW + K), strict=True)
    ]
    counts = np.bincount(np.concatenate(texts), minlength=V)
    kept = np.sort(np.argsort(-counts, kind="stable")[:V_D])
    d2t = torch.from_numpy(kept - np.arange(V_D))
    config = Eagle3Config(
        hidden_size=WIDTH,
        target_hidden_size=WIDTH,
        num_heads=4,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        intermediate_size=192,
        vocab_size=V,
        draft_vocab_size=V_D,
        aux_layers=layers,
        rms_norm_eps=facts.rms_norm_eps,
        rope=RopeConfig(facts.rope_theta),
        max_position_embeddings=256,
    )
    drafter = Eagle3Drafter(config)
    init_weights(drafter, 0)
    fit(drafter, target, d2t, texts, steps=150)
    target.close()

    (folder / "drafter").mkdir()
    (folder / "vocabulary").mkdir()
    save_file(drafter.state_dict(), folder / "drafter" / "drafter.safetensors")
    (folder / "drafter" / "drafter.json").write_text(json.dumps(config.to_json()))
    for name, array in {"d2t": d2t.numpy(), "t2d": np.isin(np.arange(V), kept), "counts": counts}.items():
        np.save(folder / "vocabulary" / f"{name}.npy", array)
    export_eagle3(folder / "drafter", folder / "target", folder / "vocabulary", folder / "export")
    return asked


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("eagle3")
    asked = fitted_export(folder)
    mixed = asked[:SEEN] + prompts(12, seed=2)
    target = load_target(folder / "target", "float32")
    plain = decode(target, None, mixed, keys=[str(i) for i in range(len(mixed))], k=0, max_new_tokens=NEW, eos=[EOS])
    ours = decode_exported(folder, folder / "export", mixed)
    request = ServingRequest(
        target=str(folder / "target"),
        drafter=str(folder / "export"),
        prompts=mixed,
        k=K,
        max_new_tokens=NEW,
        dtype="float32",
        threads=2,
    )
    (folder / "serving").mkdir()
    served = measure_in_child(request, folder / "serving", folder / "vllm.log")
    return Case(folder, mixed, ours, plain, served)


def counted_as_vllm(case: Case) -> list[list[int]]:
    return [engine_steps(len(row.tokens), row.steps, row.after_end, NEW) for row in case.ours]


def test_vllm_writes_the_same_text_with_and_without_the_drafter(case: Case) -> None:
    assert case.served.texts == case.served.plain
    assert len({tuple(text) for text in case.served.plain}) > 12


def test_our_decoder_writes_vllms_text_with_and_without_the_drafter(case: Case) -> None:
    assert [list(row.tokens) for row in case.plain] == case.served.plain
    assert [list(row.tokens) for row in case.ours] == case.served.texts


def test_vllms_counters_are_our_steps_slot_by_slot(case: Case) -> None:
    steps = counted_as_vllm(case)
    counters = case.served.counters
    assert counters.drafts == sum(map(len, steps))
    assert counters.draft_tokens == K * counters.drafts
    by_slot = tuple(sum(a >= slot for row in steps for a in row) for slot in range(1, K + 1))
    assert counters.accepted_by_slot == by_slot
    assert counters.accepted == sum(by_slot)
    # The comparison means something: every slot accepts some drafts and refuses some.
    assert counters.drafts > by_slot[0] > by_slot[1] > by_slot[2] > 0
    assert counters.acceptance_length > 1.2


def test_the_printed_command_serves_the_same_greedy_text(case: Case) -> None:
    """vLLM's OpenAI server with its defaults (prefix cache, chunked prefill), started as the report says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = serve_command(str(case.folder / "target"), str(case.folder / "export"), K, "float32", "eagle3")
    command = shlex.split(printed.replace("--port 8000", f"--port {port}").replace("\\\n", " "))
    command = [sys.executable, *command[1:], "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "32"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    address = f"http://127.0.0.1:{port}"
    with (case.folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not _answers(f"{address}/health"):
            assert server.poll() is None, (case.folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        body = {
            "model": str(case.folder / "target"),
            "prompt": case.prompts,
            "temperature": 0,
            "max_tokens": NEW,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            choices = json.load(reply)["choices"]
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as reply:
            counters = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_total\{.*\} (\S+)$", reply.read().decode(), re.M))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    texts = [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    assert texts == case.served.plain
    assert 0 < float(counters["accepted_tokens"]) < float(counters["draft_tokens"])


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_layer_ids_off_by_one_are_accepted_less(case: Case) -> None:
    """The drafter reads the layers that its export names: with every id one too high it does worse."""
    shifted = case.folder / "shifted"
    shifted.mkdir()
    values = json.loads((case.folder / "export" / "config.json").read_text())
    ids = [i + 1 for i in values["eagle_aux_hidden_state_layer_ids"]]
    values |= {"eagle_aux_hidden_state_layer_ids": ids, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    (shifted / "config.json").write_text(json.dumps(values))
    (shifted / "model.safetensors").write_bytes((case.folder / "export" / "model.safetensors").read_bytes())
    wrong = decode_exported(case.folder, shifted, case.prompts)
    assert [row.tokens for row in wrong] == [row.tokens for row in case.ours]
    # On the prompts that the drafter was fitted to; neighbouring layers of a random target are much alike.
    right, shifted_by_one = (
        acceptance([row.steps for row in rows[:SEEN]], K).length - 1 for rows in (case.ours, wrong)
    )
    assert shifted_by_one < 0.9 * right
