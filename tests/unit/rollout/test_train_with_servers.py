"""Whole runs with rollout servers, in step and one step ahead, with the built-in engine behind real connections."""

import json

import pytest
import torch
from builders import addition_file, tiny_model, tiny_run

from d3s_megatron.actor.parallel import shutdown
from d3s_megatron.audit.rollouts import load_rollouts
from d3s_megatron.config import parse_config
from d3s_megatron.rollout import RolloutConfig, make_requests
from d3s_megatron.rollout.serve import Server
from d3s_megatron.rollout.transformers_engine import TransformersEngine
from d3s_megatron.train import main

STEPS = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_model(folder / "model"), addition_file(folder / "train.jsonl")


@pytest.fixture(scope="module")
def train(inputs):
    """train(out, **settings): the step rows of a run by one server, and its flags."""
    model, config = inputs[0], RolloutConfig()
    server = Server(TransformersEngine(model, config), model, config, 256)

    def run(out, **settings):
        flags = tiny_run(*inputs, out, STEPS) | {
            "rollout.engine": "server",
            "rollout.servers": server.address,
            "audit.rollouts": "all",
            "train.export": "false",
            "optimizer.lr": 1e-2,  # large, so that weights of another step show
        }
        flags |= {name.replace("__", "."): value for name, value in settings.items()}
        args = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        try:
            main(args)
        finally:
            shutdown()  # a run that fails ends its process and so does not
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        return [row for row in rows if "reward" in row], parse_config(args)

    yield run
    server.close()


def test_in_step_every_answer_is_of_the_present_weights(train, tmp_path):
    rows, config = train(tmp_path / "run")
    assert [row["staleness"] for row in rows] == [0, 0, 0]
    assert all(row["mismatch_max"] < 1e-4 for row in rows)
    assert config.algorithm.rollout_correction == "token"


def test_one_ahead_answers_are_one_update_old_and_old_log_probs_are_the_trainers(inputs, train, tmp_path):
    rows, config = train(tmp_path / "run", rollout__ahead="true", optimizer__lr=2e-3)
    assert [row["staleness"] for row in rows] == [0, 1, 1] and all(row["num_updates"] == 1 for row in rows)
    assert rows[0]["mismatch_max"] < 1e-4 < 1e-3 < min(row["mismatch_max"] for row in rows[1:])
    # pi_new / pi_old before the only update of a step: 1 where old is the trainer's, and not where it is the engine's.
    for row in rows:
        assert row["ratio"] == pytest.approx(1, abs=1e-6) and row["policy_kl"] == pytest.approx(0, abs=1e-9)

    engine = TransformersEngine(inputs[0], config.rollout)  # the first weights, of which steps 1 and 2 both come
    for step in (0, 1):
        saved = load_rollouts(tmp_path / "run", step)[0]
        groups = {r.request.group_id: r.request.prompt for r in saved}
        requests = make_requests([groups[i] for i in range(len(groups))], 4, config.train.seed, step)
        again = engine.generate(requests, config.rollout.sampling())
        assert [r.token_ids for r in saved] == [r.token_ids for r in again]
        for a, b in zip(saved, again, strict=True):
            torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), rtol=1e-5, atol=1e-5)


def test_a_mismatch_above_the_limit_ends_the_run_before_it_trains(train, tmp_path):
    with pytest.raises(RuntimeError, match=r"step 2: .* nats a token, above rollout.max_mismatch 0.0001"):
        train(tmp_path / "run", rollout__ahead="true", rollout__max_mismatch=1e-4)
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 2  # evaluation, first step
