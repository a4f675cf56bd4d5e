"""vLLM servers outside of the job: weights from every layout, equal answers by any number of them, a server killed."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from builders import addition_file, tiny_model, tiny_run
from helpers import run_python

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs these in an environment of its own")

from vllm_servers import MAX_MODEL_LEN, ServerProcess, addresses  # noqa: E402

from d3s_megatron.convert import HFFolder, read_shape  # noqa: E402
from d3s_megatron.rollout import RolloutConfig, Sampling, broadcast, make_requests  # noqa: E402
from d3s_megatron.rollout.client import Client  # noqa: E402
from d3s_megatron.rollout.server_engine import ServerEngine  # noqa: E402
from d3s_megatron.types import Prompt  # noqa: E402

WIDE = {"hidden_size": 128, "intermediate_size": 64}  # vLLM's CPU attention wants heads of 32 or more
PROMPTS = [Prompt(str(i), "", (i % 10, 10, i % 7, 11), "") for i in range(24)]
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": tiny_model(folder / "tied", "qwen2", tie_word_embeddings=True, **WIDE),
        "untied": tiny_model(folder / "untied", "llama", tie_word_embeddings=False, **WIDE),
    }


@pytest.fixture(scope="module")
def servers(models):
    """Three servers of the tied model, and one of the other over two ranks, started together."""
    made = {"tied": [ServerProcess(models["tied"]) for _ in range(3)], "untied": [ServerProcess(models["untied"], 2)]}
    yield made
    for server in [server for kind in made.values() for server in kind]:
        server.end()


def engine_of(model, servers, stream=None, **settings):
    config = RolloutConfig(engine="server", servers=addresses(servers), max_batch_size=32, server_patience=60)
    engine = ServerEngine(model, replace(config, **settings), MAX_MODEL_LEN)
    engine.load_weights(stream or HFFolder(model).tensors(read_shape(model)))
    return engine


def test_any_number_of_servers_gives_the_same_answers(models, servers):
    one = engine_of(models["tied"], servers["tied"][:1])
    requests, sampling = make_requests(PROMPTS, 8, 3, 0), Sampling(max_new_tokens=12)
    first = one.generate(requests, sampling)
    both = engine_of(models["tied"], servers["tied"][:2])
    for again in (both.generate(requests, sampling), both.generate(requests, sampling)):
        assert [r.token_ids for r in again] == [r.token_ids for r in first]
    assert [r.request for r in first] == requests
    assert len({r.token_ids for r in first[:8]}) > 2  # one prompt, seeds of their own
    other = both.generate(make_requests(PROMPTS, 8, 4, 0), sampling)
    assert [r.token_ids for r in other] != [r.token_ids for r in first]


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_every_layout_reach_the_server(models, servers, tmp_path, layout, kind):
    """Fault G04, through D3S itself: after updates that move every token's log-prob, and as the first after resume.

    From TP 2 x PP 2 they go by broadcast, to one server over two ranks, or to two servers.
    """
    tp, pp = LAYOUTS[layout]
    transport = "broadcast" if layout == "tp2pp2" else "http"
    out = tmp_path / "run"
    settings = tiny_run(models[kind], addition_file(tmp_path / "train.jsonl"), out, 2) | {
        "rollout.engine": "server",
        "rollout.servers": addresses(servers[kind][: 2 if transport == "broadcast" else 1]),
        "rollout.weight_transport": transport,
        "actor.tensor_model_parallel_size": tp,
        "actor.pipeline_model_parallel_size": pp,
        "optimizer.lr": 1e-2,
        "checkpoint.every": 1,
        "train.export": "false",
    }
    for steps in (2, 3) if (layout, kind) == ("tp2pp2", "tied") else (2,):
        flags = [
            part for key, value in (settings | {"train.steps": steps}).items() for part in (f"--{key}", str(value))
        ]
        done = run_python(["-m", "d3s_megatron.train", *flags], tp * pp)
        assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    assert [row["step"] for row in rows] == list(range(steps))
    assert all(row["num_updates"] == 1 and row["mismatch_max"] < 1e-3 and row["sync_mismatch"] < 1e-3 for row in rows)


def test_one_step_ahead_the_server_answers_while_the_trainer_works(models, servers, tmp_path):
    out = tmp_path / "run"
    settings = tiny_run(models["tied"], addition_file(tmp_path / "train.jsonl"), out, 3) | {
        "rollout.engine": "server",
        "rollout.servers": addresses(servers["tied"][:2]),
        "rollout.ahead": "true",
        "optimizer.lr": 1e-4,  # of a random model it moves every log-prob by about 0.1
        "train.export": "false",
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    done = run_python(["-m", "d3s_megatron.train", *flags])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    assert [row["staleness"] for row in rows] == [0, 1, 1]
    assert rows[0]["mismatch_max"] < 1e-3 < 1e-2 < min(row["mismatch_max"] for row in rows[1:])
    assert all(row["ratio"] == pytest.approx(1, abs=1e-5) for row in rows)  # old log-probs are the trainer's


def test_a_server_killed_in_mid_sync_is_named_and_the_others_get_every_weight(models, servers, monkeypatch, capfd):
    """Comes after those that need nobody's loss; one of three, by broadcast."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 100_000)
    new = list(HFFolder(models["tied"]).tensors(read_shape(models["tied"])))
    *others, doomed = servers["tied"]

    def stream():
        for i, pair in enumerate(new):
            if i == len(new) // 2:
                doomed.process.kill()
            yield pair

    engine = engine_of(models["tied"], servers["tied"], stream(), weight_transport="broadcast", server_timeout=20)
    said = capfd.readouterr().err
    assert said.count("did not take the weights") == 1 and f"{doomed.address} did not take" in said
    assert [Client(server.address, 10).health()["version"] for server in others] == [engine._version] * 2
    requests, sampling = make_requests(PROMPTS, 2, 3, 0), Sampling(max_new_tokens=12)
    by_http = engine_of(models["tied"], others[:1]).generate(requests, sampling)
    engine.load_weights(iter(new))  # the two that are left, in their group
    assert [r.token_ids for r in engine.generate(requests, sampling)] == [r.token_ids for r in by_http]


def test_a_server_killed_in_mid_step_is_named_and_its_prompts_are_answered_by_the_other(models, servers, capfd):
    """Comes after those that need both servers."""
    first, second, _ = servers["tied"]
    engine = engine_of(models["tied"], [first, second])
    requests = make_requests(PROMPTS, 8, 3, 0)
    sampling = Sampling(max_new_tokens=200)
    got = []
    thread = threading.Thread(target=lambda: got.extend(engine.generate(requests, sampling)))
    thread.start()
    while not Client(second.address, 10).health()["num_waiting"]:
        time.sleep(0.05)
    second.process.kill()
    thread.join()
    assert [r.request for r in got] == requests and all(r.token_ids for r in got)
    said = capfd.readouterr().err
    assert said.count("is lost to rank 0") == 1
    assert f"{second.address} is lost" in said and f"its prompts go to {first.address}" in said

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32)
    for rollout in got[::16]:
        prompt, answer = rollout.request.prompt.token_ids, rollout.token_ids
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        difference = log_probs[range(len(answer)), answer] - torch.tensor(rollout.log_probs)
        assert difference.abs().max() < 1e-3


def test_weights_that_do_not_fit_are_refused_by_every_rank_of_a_server(models, servers):
    engine = engine_of(models["untied"], servers["untied"])
    with pytest.raises(ValueError, match="refused the weights: .*unknown"):
        engine.load_weights([("model.layers.9.mlp.weight", torch.zeros(1))])
    engine = engine_of(models["untied"], servers["untied"])
    assert len(engine.generate(make_requests(PROMPTS[:2], 2, 3, 0), Sampling(max_new_tokens=4))) == 4


def test_a_server_that_is_asked_to_end_ends(servers):
    """Comes last. torchrun itself ends with 1 when it is asked to."""
    assert servers["tied"][0].end() == 0
    servers["untied"][0].end()
