"""vLLM on a GPU: sleep and wake beside the trainer, weights by broadcast (NCCL from two GPUs on), a run in bfloat16.

D3S_GPU_TESTS_ON_CPU=1 runs them without a GPU, where there is nothing to put to sleep and gloo takes NCCL's place.
"""

import json
import os

import pytest
import torch
from builders import addition_file, tiny_model, tiny_run
from helpers import run_python
from vllm_servers import MAX_MODEL_LEN, ServerProcess

from d3s_megatron.actor.config import ActorConfig
from d3s_megatron.actor.parallel import init_parallel, shutdown
from d3s_megatron.rollout import RolloutConfig, Sampling, broadcast, make_requests
from d3s_megatron.rollout.dispatch import NoServerLeft
from d3s_megatron.rollout.server_engine import ServerEngine
from d3s_megatron.types import Prompt

ON_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and "D3S_GPU_TESTS_ON_CPU" not in os.environ, reason="no CUDA device"),
    pytest.mark.timeout(600),
]
pytest.importorskip("vllm", reason="vLLM is not installed here")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

MEMORY_SHARE = 0.2  # of the GPU, for each engine
AGREES, DIFFERS = 0.05, 0.5  # nats a token, bfloat16 engine and float32 model: measured 0.01, and above 1
PROMPTS = [Prompt(str(i), "", ids, "") for i, ids in enumerate([(1, 10, 2), (3, 4, 10, 5, 11)])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, the model in float32 with other weights than the folder's)"""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}  # heads of 64
    folder = tiny_model(tmp_path_factory.mktemp("model"), **sizes)
    changed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return folder, changed


def weights(model):
    device = "cuda" if ON_GPU else "cpu"
    return [(name, parameter.detach().to(device)) for name, parameter in model.named_parameters()]


def generate(engine, step=0):
    return engine.generate(make_requests(PROMPTS, 8, 3, step), Sampling(max_new_tokens=10))


def ids(rollouts):
    return [rollout.token_ids for rollout in rollouts]


@torch.no_grad()
def mismatch(rollouts, model):
    """Mean difference to the model's log-probs, nats a token."""
    differences = []
    for rollout in rollouts:
        prompt, answer = list(rollout.request.prompt.token_ids), list(rollout.token_ids)
        log_probs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        differences.append(log_probs[range(len(answer)), answer] - torch.tensor(rollout.log_probs))
    return float(torch.cat(differences).abs().mean())


def test_an_engine_that_slept_has_its_weights_or_the_new_ones(model):
    from d3s_megatron.rollout.vllm_engine import CACHE, VllmEngine

    folder, changed = model
    init_parallel(ActorConfig())
    config = RolloutConfig(engine="vllm", dtype="bfloat16", max_batch_size=16, vllm_memory_share=MEMORY_SHARE)
    engine = VllmEngine(folder, config, max_model_len=64)
    first = generate(engine)
    assert mismatch(first, changed) > DIFFERS

    def rest():
        before = torch.cuda.mem_get_info()[0] if ON_GPU else 0
        engine.rest()
        if ON_GPU:  # its cache is nearly all of its share
            free, total = torch.cuda.mem_get_info()
            assert free - before > 0.5 * MEMORY_SHARE * total

    rest()
    assert ids(generate(engine)) == ids(first)  # as after a step without an update
    rest()
    engine.load_weights(weights(changed))
    assert not ON_GPU or engine._asleep == {CACHE}  # new weights need no room for the cache
    new = generate(engine, step=1)
    assert mismatch(new, changed) < AGREES
    rest()
    assert ids(generate(engine, step=1)) == ids(new)
    engine.close()
    shutdown()


@pytest.fixture
def server(model):
    """On a GPU of its own where there are two."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    place = {"CUDA_VISIBLE_DEVICES": mine[1]} if torch.cuda.device_count() > 1 else {}
    running = ServerProcess(model[0], 1, "--dtype", "bfloat16", "--memory-share", str(MEMORY_SHARE), **place)
    yield running
    running.process.kill()
    running.process.wait()


def test_weights_by_broadcast_and_a_server_that_dies_in_the_middle(model, server, monkeypatch):
    """By NCCL where the server has a GPU of its own."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 200_000)
    folder, changed = model
    by_nccl = torch.cuda.device_count() > 1
    config = RolloutConfig(
        engine="server",
        dtype="bfloat16",
        servers=server.address,
        weight_transport="broadcast",
        server_timeout=20,
        max_batch_size=16,
    )
    engine = ServerEngine(
        folder, config, MAX_MODEL_LEN, device=torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    )
    new = weights(changed)
    for _ in range(2):  # the second in the same group
        engine.load_weights(new)
    assert engine._broadcast.group.place.backend == ("nccl" if by_nccl else "gloo")
    assert mismatch(generate(engine), changed) < AGREES

    def dying():
        for i, pair in enumerate(new):
            if i == len(new) // 2:
                server.process.kill()
            yield pair

    with pytest.raises(NoServerLeft, match="no rollout server took the weights"):
        engine.load_weights(dying())


def test_a_run_with_engine_and_trainer_in_bfloat16(model, tmp_path):
    settings = tiny_run(model[0], addition_file(tmp_path / "train.jsonl"), tmp_path / "run", 3) | {
        "rollout.engine": "vllm",
        "rollout.dtype": "bfloat16",
        "rollout.vllm_memory_share": MEMORY_SHARE,
        "actor.dtype": "bfloat16",
        "optimizer.lr": 1e-2,  # large, so that stale weights would show
        "train.export": "false",
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    done = run_python(["-m", "d3s_megatron.train", *flags])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    assert len(rows) == 3
    assert all(row["num_updates"] == 1 and row["mismatch_mean"] < AGREES for row in rows), rows
