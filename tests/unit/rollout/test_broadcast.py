"""Weights by broadcast: the group follows the servers that are there, and nobody waits for one that is not."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from helpers import ROOT

from d3s_megatron.convert import HFFolder, read_shape
from d3s_megatron.rollout import RolloutConfig, Sampling, broadcast
from d3s_megatron.rollout import group as groups
from d3s_megatron.rollout.server_engine import ServerEngine
from d3s_megatron.rollout.transformers_engine import TransformersEngine

CONFIG = RolloutConfig(server_patience=60, server_timeout=4)


def weights(folder):
    return list(HFFolder(folder).tensors(read_shape(folder)))


@pytest.fixture(scope="module")
def process(folder):
    """A server in a process of its own."""
    command = ["-m", "d3s_megatron.rollout.serve", "--model", str(folder()), "--engine", "transformers", "--port", "0"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True)
    running.address = next(line.split()[-1] for line in running.stdout if line.startswith("serving "))
    yield running
    running.kill()
    running.wait()


@pytest.fixture
def engine_of(folder, monkeypatch):
    """engine_of(addresses): the run's end, with several buckets a sync."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 6000)
    monkeypatch.setattr(broadcast, "GRACE_SECONDS", 0.5)

    def make(*addresses):
        return ServerEngine(
            folder(), replace(CONFIG, engine="server", servers=",".join(addresses), weight_transport="broadcast"), 64
        )

    return make


def holders(servers):
    return {server.worker.version for server in servers}


def test_a_group_is_kept_while_the_same_servers_are_there(folder, serve, engine_of, capfd):
    first, second = serve(), serve()
    engine = engine_of(first.address, second.address)
    names = []
    for _ in range(2):
        engine.load_weights(weights(folder()))
        names.append(first.membership.name)
    assert names[0] == names[1] == second.membership.name
    second.close()
    engine.load_weights(weights(folder()))  # without it
    assert f"{second.address} did not take the weights" in capfd.readouterr().err
    again = serve(port=second.server_address[1])
    engine.load_weights(weights(folder()))  # it joins late
    assert f"{again.address} is back" in capfd.readouterr().err
    assert first.membership.name == again.membership.name not in names
    assert holders([first, again]) == {engine._version}


def test_two_runs_that_share_a_server_take_turns(folder, serve, engine_of):
    server = serve()
    runs = [engine_of(server.address), engine_of(server.address)]
    for run in (*runs, *runs):
        run.load_weights(weights(folder()))
        assert server.worker.version == run._version


def test_a_member_that_dies_before_it_connects_makes_nobody_wait_forever():
    run = broadcast.Broadcast(0.5, torch.device("cpu"))
    with pytest.raises(RuntimeError):
        groups.Group(run.places(["127.0.0.1"], "gloo")[0], "127.0.0.1")
    with pytest.raises(RuntimeError, match="not every member was there after 0.1 s"):
        groups._within(0.1, threading.Event().wait)  # as NCCL, which has no time limit of its own there


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_server_lost_in_mid_sync_is_named_and_the_others_get_every_weight(
    folder, serve, engine_of, process, requests_for, capfd, blow
):
    """The stream of weights is drawn once, to its end. The kill comes last."""
    others = [serve(), serve(), serve()]
    engine = engine_of(others[0].address, process.address, *(server.address for server in others[1:]))
    new, drawn = weights(folder("qwen2-tied", 7)), []

    def stream():
        for i, pair in enumerate(new):
            if i == 9:
                process.send_signal(blow)
            drawn.append(pair[0])
            yield pair

    engine.load_weights(stream())
    process.send_signal(signal.SIGCONT)
    assert drawn == [name for name, _ in new]
    said = capfd.readouterr().err
    assert said.count("did not take the weights") == 1 and f"{process.address} did not take" in said
    assert holders(others) == {engine._version}
    sampling = Sampling(max_new_tokens=5)
    expected = TransformersEngine(folder("qwen2-tied", 7), CONFIG).generate(requests_for(4), sampling)
    assert [r.token_ids for r in engine.generate(requests_for(4), sampling)] == [r.token_ids for r in expected]
