"""An engine that took no weights, or the wrong ones, is found before its first rollout with them."""

import json

import pytest
from builders import addition_file, tiny_model, tiny_run

from d3s_megatron.actor.parallel import shutdown
from d3s_megatron.config import parse_config
from d3s_megatron.rollout import RolloutConfig, transformers_engine
from d3s_megatron.rollout.serve import Server
from d3s_megatron.rollout.transformers_engine import TransformersEngine
from d3s_megatron.sync_probe import tolerance
from d3s_megatron.train import main


class StaleEngine(TransformersEngine):
    """Reads new weights and keeps its own, from the `fresh`-th time on."""

    fresh = 0

    def load_weights(self, stream):
        if type(self).fresh > 0:
            super().load_weights(stream)
        else:
            list(stream)
        type(self).fresh -= 1


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_model(folder / "model"), addition_file(folder / "train.jsonl")


@pytest.fixture
def train(inputs, tmp_path):
    """train(name, **settings): the step rows of a run of two steps."""

    def run(name="run", **settings):
        flags = tiny_run(*inputs, tmp_path / name, 2) | {"train.export": "false", "optimizer.lr": 1e-2}
        flags |= {key.replace("__", "."): value for key, value in settings.items()}
        try:
            main([part for key, value in flags.items() for part in (f"--{key}", str(value))])
        finally:
            shutdown()
        rows = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        return [row for row in rows if "reward" in row]

    return run


def test_engine_and_trainer_agree_and_the_probe_changes_nothing(train):
    with_probe, without = train("with", rollout__probe_after_sync="true"), train("without")
    assert all(row["sync_mismatch"] < 1e-5 for row in with_probe)
    assert not any("sync_mismatch" in row for row in without)

    def lasting(row):
        return {name: value for name, value in row.items() if "time" not in name and name != "sync_mismatch"}

    assert [lasting(row) for row in with_probe] == [lasting(row) for row in without]


def test_a_stale_engine_ends_the_run_before_its_first_rollout(train, monkeypatch):
    monkeypatch.setattr(transformers_engine, "TransformersEngine", StaleEngine)
    monkeypatch.setattr(StaleEngine, "fresh", 1)
    generated = []
    whole = StaleEngine.generate
    monkeypatch.setattr(StaleEngine, "generate", lambda *args: generated.append(args[1]) or whole(*args))
    with pytest.raises(RuntimeError, match=r"after the weight sync of step 2: .* the engine of rank 0 differ by"):
        train(rollout__probe_after_sync="true")
    assert [len(requests) for requests in generated[-3:]] == [16, 2, 8]  # the step's, and the probe's


def test_a_server_whose_engine_stays_as_it_was_is_named_although_its_checksum_is_right(train, inputs, monkeypatch):
    monkeypatch.setattr(StaleEngine, "fresh", 1)
    model, config = inputs[0], RolloutConfig()
    server = Server(StaleEngine(model, config), model, config, 256)
    settings = {"rollout.engine": "server", "rollout.servers": server.address}
    try:
        with pytest.raises(RuntimeError, match=f"the weight sync of step 1: .* rollout server {server.address} differ"):
            train(**settings)
    finally:
        server.close()


def test_the_tolerance_follows_the_types(inputs):
    def of(*args):
        flags = ["--model.path", str(inputs[0]), "--data.train_path", str(inputs[1]), *args]
        return tolerance(parse_config(flags))

    assert of() == 0.01
    assert of("--rollout.dtype", "bfloat16") == of("--actor.dtype", "bfloat16") == 0.1
    assert of("--rollout.probe_tolerance", "0.05") == 0.05
