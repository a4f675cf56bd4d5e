"""Launching: what would hang is refused by name, and two nodes train together."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from helpers import HANG_SECONDS, ROOT, own_environment
from test_resume import flags, rows_of, train

from d3s_megatron.actor.parallel import shutdown
from d3s_megatron.launch import main, torchrun_command, what_is_wrong


def arguments(**changes):
    settings = dict(nnodes=2, node_rank=0, endpoint="192.0.2.1:29500", nproc=8, max_restarts=0, run_id="x")
    return argparse.Namespace(**(settings | {"allow_loopback": False} | changes))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"endpoint": None}, "--endpoint is missing, and MASTER_ADDR is not set"),
        ({"endpoint": "localhost:29500"}, "loopback"),
        ({"endpoint": "127.0.0.1:29500"}, "loopback"),
        ({"endpoint": "no-such-node.invalid:29500"}, "'no-such-node.invalid' cannot be resolved"),
        ({"endpoint": "node0"}, "give HOST:PORT"),
        ({"node_rank": None}, "--node-rank is missing, and NODE_RANK is not set"),
        ({"node_rank": 2}, "with 2 nodes give 0 to 1"),
        ({"nproc": 0}, "give at least 1"),
    ],
)
def test_a_launch_that_would_hang_is_refused_by_name(changes, said):
    """Fault F07."""
    assert said in what_is_wrong(arguments(**changes))
    assert what_is_wrong(arguments()) == "" == what_is_wrong(arguments(nnodes=1, node_rank=None, endpoint=None))


def test_a_missing_endpoint_ends_at_once(monkeypatch, capsys):
    for name in ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--nnodes", "2", "--node-rank", "1", "--", "config.yaml"]) == 2
    assert "MASTER_ADDR is not set" in capsys.readouterr().err


def test_the_first_node_alone_hosts_the_store():
    for rank in (0, 1):
        command = torchrun_command(arguments(node_rank=rank), ["config.yaml"])
        assert f"is_host={int(rank == 0)}" in command and command[-3:] == ["-m", "d3s_megatron.train", "config.yaml"]


def test_another_world_than_expected_is_refused_with_what_has_joined(inputs, tmp_path):
    with pytest.raises(RuntimeError, match=r"launch.world_size is 3, but 1 ranks.*\n1 ranks on 1 node.*\n.*torch 2"):
        train(inputs, tmp_path / "run", launch__world_size=3)
    shutdown()


@pytest.fixture
def nodes():
    """Two network name spaces joined by a cable, where the test may make them; else None, for loopback."""
    mark = f"d3s{os.getpid()}"
    names, made = (f"{mark}a", f"{mark}b"), []

    def ip(*args):
        return subprocess.run(["ip", *args], capture_output=True).returncode == 0

    try:
        if not shutil.which("ip") or not all(ip("netns", "add", name) and not made.append(name) for name in names):
            yield None
            return
        good = ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for i, name in enumerate(names):
            good = good and ip("link", "set", name, "netns", name)
            good = good and ip("-n", name, "addr", "add", f"10.231.77.{i + 1}/24", "dev", name)
            good = good and ip("-n", name, "link", "set", name, "up") and ip("-n", name, "link", "set", "lo", "up")
        yield names if good else None
    finally:
        for name in made:
            ip("netns", "del", name)


def test_two_nodes_take_two_steps_together(inputs, nodes, tmp_path):
    port = 10_000 + os.getpid() % 20_000  # below those that the kernel gives to whoever asks for any
    argv = flags(inputs, tmp_path / "run", train__steps=2, launch__world_size=2, actor__tensor_model_parallel_size=2)
    running = []
    for rank in (0, 1):
        env = own_environment()
        host, prefix, options = "127.0.0.1", [], ["--allow-loopback"]
        if nodes:
            host, prefix, options = "10.231.77.1", ["ip", "netns", "exec", nodes[rank]], []
            # The name of this machine means nothing in its name spaces.
            env |= {"GLOO_SOCKET_IFNAME": nodes[rank], "PET_LOCAL_ADDR": f"10.231.77.{rank + 1}"}
        own = ["--nnodes", "2", "--node-rank", str(rank), "--endpoint", f"{host}:{port}", *options]
        command = [*prefix, sys.executable, "-m", "d3s_megatron.launch", *own, "--", *argv]
        running.append(
            subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    done = [process.communicate(timeout=HANG_SECONDS) for process in running]
    assert [process.returncode for process in running] == [0, 0], [err[-2000:] for _, err in done]
    said = done[0][0] + done[1][0]
    assert "2 ranks on 2 node(s), endpoint" in said
    assert [row["step"] for row in rows_of(tmp_path / "run") if "progress" in row] == [0, 1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2


def test_two_runs_at_once_on_one_machine_do_not_meet(inputs, tmp_path):
    """Fault F08: each launch finds ports of its own."""
    env = own_environment()
    command = [sys.executable, "-m", "d3s_megatron.launch", "--"]
    running = []
    for seed in (0, 1):
        argv = flags(inputs, tmp_path / str(seed), train__steps=1, train__seed=seed, launch__world_size=1)
        running.append(subprocess.Popen([*command, *argv], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=HANG_SECONDS)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    ports = {re.search(r"1 ranks on 1 node\(s\), endpoint \S+:(\d+)", text)[1] for text in said}
    assert len(ports) == 2
    for seed in (0, 1):
        summary = json.loads((tmp_path / str(seed) / "summary.json").read_text())
        assert (summary["seed"], summary["world_size"]) == (seed, 1)


def test_the_scripts_are_whole():
    folder = ROOT / "examples" / "launch"
    for script in (*folder.glob("*.sh"), *folder.glob("*.sbatch")):
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK) and "d3s_megatron.launch" in script.read_text()
    job = yaml.safe_load((folder / "kubernetes" / "pytorchjob.yaml").read_text())
    assert job["spec"]["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}


def test_a_script_without_its_endpoint_says_which(tmp_path):
    env = {"PATH": os.environ["PATH"], "NNODES": "2", "NODE_RANK": "0"}
    done = subprocess.run([ROOT / "examples/launch/nodes.sh", "x"], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "MASTER_ADDR: set the name of the first node" in done.stderr
