"""Rollout servers over real connections, with the built-in engine behind them: answers, weights, and servers lost."""

from dataclasses import replace

import pytest
import torch

from d3s_megatron.convert import HFFolder, read_shape
from d3s_megatron.rollout import RolloutConfig, Sampling
from d3s_megatron.rollout.dispatch import NoServerLeft
from d3s_megatron.rollout.server_engine import ServerEngine
from d3s_megatron.rollout.transformers_engine import TransformersEngine

SAMPLING = Sampling(0.8, max_new_tokens=12)
CONFIG = RolloutConfig(server_patience=0.1, server_timeout=30)


def weights(folder):
    source = HFFolder(folder)
    return list(source.tensors(read_shape(folder)))


@pytest.fixture
def engine_of(folder):
    """engine_of(servers, **settings): the run's end, trained model of seed 0."""

    def make(servers, max_model_len=32, **settings):
        addresses = ",".join(server.address for server in servers)
        config = replace(CONFIG, **{"engine": "server", "servers": addresses, "max_batch_size": 8} | settings)
        return ServerEngine(folder("qwen2-tied", 0), config, max_model_len)

    return make


def answers(rollouts):
    return [(r.request, r.token_ids, r.log_probs, r.finish_reason, r.text) for r in rollouts]


@pytest.mark.parametrize("num_servers", [1, 3])
def test_answers_are_those_of_the_engine_itself_however_many_servers(
    folder, serve, engine_of, requests_for, num_servers
):
    """Servers that begin with other weights, too: a run sends its own before the first answer."""
    engine = engine_of([serve(seed) for seed in range(1, 1 + num_servers)])
    with pytest.raises(NoServerLeft, match="send them first"):
        engine.generate(requests_for(4), SAMPLING)
    engine.load_weights(weights(folder("qwen2-tied", 0)))
    requests = requests_for(6)[::-1]
    expected = TransformersEngine(folder("qwen2-tied", 0), CONFIG).generate(requests, SAMPLING)
    for _ in range(2):
        got = engine.generate(requests, SAMPLING)
        assert [r[:2] + r[3:] for r in answers(got)] == [r[:2] + r[3:] for r in answers(expected)]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), rtol=1e-5, atol=1e-5)
    assert len({r.token_ids for r in got}) > 9


@pytest.mark.parametrize("transport", ["http", "folder", "broadcast"])
def test_new_weights_reach_every_server(folder, serve, engine_of, requests_for, tmp_path, transport):
    servers = [serve(), serve()]
    engine = engine_of(servers, weight_transport=transport, sync_folder=str(tmp_path))
    new = weights(folder("qwen2-tied", 5))
    engine.load_weights(iter(new))
    expected = TransformersEngine(folder("qwen2-tied", 5), CONFIG).generate(requests_for(4), SAMPLING)
    assert [r.token_ids for r in engine.generate(requests_for(4), SAMPLING)] == [r.token_ids for r in expected]
    assert {server.worker.version for server in servers} == {engine._version}
    assert engine.sync_bytes == sum(tensor.nbytes for _, tensor in new)
    assert not list(tmp_path.iterdir())


def test_a_lost_server_is_named_and_its_prompts_go_to_the_others(folder, serve, engine_of, requests_for, capfd):
    first, second = serve(), serve()
    engine = engine_of([first, second])
    engine.load_weights(weights(folder("qwen2-tied", 0)))
    expected = answers(engine.generate(requests_for(4), SAMPLING))
    second.close()
    assert answers(engine.generate(requests_for(4), SAMPLING)) == expected
    said = capfd.readouterr().err
    assert said.count("is lost to rank 0") == 1 and f"{second.address} is lost" in said and first.address in said

    again = serve(seed=3, port=second.server_address[1])  # as its first weights are others, it waits for the next
    assert answers(engine.generate(requests_for(4), SAMPLING)) == expected
    engine.load_weights(weights(folder("qwen2-tied", 0)))
    assert f"{again.address} is back" in capfd.readouterr().err and again.worker.version == engine._version

    first.close()
    again.close()
    with pytest.raises(NoServerLeft, match="no rollout server is left .* 3 of 3 prompts"):
        engine.generate(requests_for(4), SAMPLING)
    with pytest.raises(NoServerLeft, match="took the weights"):
        engine.load_weights(weights(folder("qwen2-tied", 0)))


def test_a_server_with_weights_of_another_run_is_not_asked(folder, serve, engine_of, requests_for, capfd):
    """Fault G04: an answer of other weights never comes back."""
    server = serve()
    mine, others = engine_of([server]), engine_of([server])
    mine.load_weights(weights(folder("qwen2-tied", 0)))
    others.load_weights(weights(folder("qwen2-tied", 0)))
    with pytest.raises(NoServerLeft):
        mine.generate(requests_for(2), SAMPLING)
    assert "asked for weights" in capfd.readouterr().err


@pytest.mark.parametrize("transport", ["http", "broadcast"])
def test_weights_that_do_not_fit_are_refused_and_the_server_lives_on(folder, serve, engine_of, requests_for, transport):
    server = serve()
    engine = engine_of([server], weight_transport=transport)
    right = weights(folder("qwen2-tied", 0))
    for wrong, what in (
        ([*right, ("lm_head.weight", torch.zeros(2, 2))], "unknown"),
        (right[1:], "never came"),
        ([(right[0][0], torch.zeros(3)), *right[1:]], "shape"),
    ):
        with pytest.raises(ValueError, match=f"{server.address} refused the weights: .*{what}"):
            engine.load_weights(wrong)
    engine.load_weights(right)
    assert len(engine.generate(requests_for(2), SAMPLING)) == 6


@pytest.mark.parametrize("transport", ["http", "broadcast"])
def test_a_stream_that_fails_in_the_trainer_leaves_no_server_waiting(folder, serve, engine_of, requests_for, transport):
    engine = engine_of([serve(), serve()], weight_transport=transport)

    def broken():
        yield from weights(folder("qwen2-tied", 0))[:2]
        raise FloatingPointError("in the trainer")

    with pytest.raises(FloatingPointError):
        engine.load_weights(broken())
    engine.load_weights(weights(folder("qwen2-tied", 0)))
    assert len(engine.generate(requests_for(2), SAMPLING)) == 6


def test_a_request_that_is_too_long_ends_the_run_and_not_the_server(folder, serve, engine_of, requests_for):
    engine = engine_of([serve()])
    engine.load_weights(weights(folder("qwen2-tied", 0)))
    with pytest.raises(ValueError, match="max_new_tokens 90"):
        engine.generate(requests_for(2), Sampling(max_new_tokens=90))
    assert len(engine.generate(requests_for(2), SAMPLING)) == 6


def test_servers_that_do_not_fit_are_named_at_the_start(serve, engine_of):
    server = serve()
    with pytest.raises(ValueError, match=f"{server.address} takes 64 tokens .* needs 65"):
        engine_of([server], max_model_len=65)
    with pytest.raises(ValueError, match="serves another model: .*tied False instead of True"):
        engine_of([serve(family="qwen2-untied")])
    with pytest.raises(ValueError, match="computes in float32, rollout.dtype is bfloat16"):
        engine_of([server], dtype="bfloat16")
    server.close()
    with pytest.raises(ValueError, match="does not answer"):
        engine_of([server])


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"engine": "server"}, "servers is empty"),
        ({"engine": "server", "servers": "localhost:8000"}, "http://HOST:PORT"),
        ({"engine": "server", "servers": "http://a:1", "weight_transport": "folder"}, "sync_folder is empty"),
        ({"ahead": True}, "ahead"),
        ({"max_mismatch": -1.0}, "max_mismatch"),
    ],
)
def test_wrong_settings_are_said(settings, what):
    with pytest.raises(ValueError, match=what):
        RolloutConfig(**settings)
