"""Starts a training run on this node by torchrun, after looking at what would make it hang:

    python -m d3s_megatron.launch --nnodes 2 --node-rank 0 --endpoint host0:29500 --nproc 8 -- CONFIG.yaml --key value

Every node runs the same line with its own --node-rank; everything after `--` goes to `d3s_megatron.train`. Flags left
out come from the environment that Slurm and Kubeflow set, or that the scripts in examples/launch/ set from it:
NNODES, NODE_RANK, MASTER_ADDR with MASTER_PORT, NPROC_PER_NODE.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence

DEFAULT_PORT = 29500
SECONDS_TO_SAY_IT = 5.0
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
SHUTDOWN_SECONDS = "300"  # what a rank gets to end its step and save after SIGTERM; torchrun's own 30 is short


def say_error(message: str) -> None:
    """One line on standard error from all ranks together, each of which found the same mistake and will end.

    Rank 0 says it; the others wait for it to be said, since torchrun ends all ranks as soon as one has ended.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_SAY_IT)


def own_environment() -> dict[str, str]:
    """For a job started from here: without this process's place in its own, and one thread a process unless set."""
    return {"OMP_NUM_THREADS": "1"} | {name: value for name, value in os.environ.items() if name not in PLACE}


def main(argv: Sequence[str]) -> int:
    """Replaces this process by torchrun; exit code 2 with one line where the launch cannot work."""
    own, _, rest = _split(argv)
    args = _parser(os.environ).parse_args(own)
    wrong = what_is_wrong(args)
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    command = torchrun_command(args, rest)
    print(f"node {args.node_rank} of {args.nnodes} ({socket.gethostname()}): {' '.join(command)}", flush=True)
    os.execvp(command[0], command)


def _split(argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), "--", list(argv[at + 1 :])


def _parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m d3s_megatron.launch", description=__doc__)
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT", str(DEFAULT_PORT))
    parser.add_argument("--nnodes", type=int, default=int(env.get("NNODES", "1")))
    rank = env.get("NODE_RANK")
    parser.add_argument("--node-rank", type=int, default=None if rank is None else int(rank))
    parser.add_argument("--endpoint", default=f"{address}:{port}" if address else None, help="HOST:PORT of node 0")
    parser.add_argument("--nproc", type=int, default=int(env.get("NPROC_PER_NODE", "1")), help="ranks on this node")
    parser.add_argument("--max-restarts", type=int, default=0, help="start all ranks again after a failure")
    parser.add_argument("--run-id", default=env.get("SLURM_JOB_ID", "d3s"), help="keeps two runs at one endpoint apart")
    parser.add_argument("--allow-loopback", action="store_true", help="all nodes are on this machine")
    return parser


def what_is_wrong(args: argparse.Namespace) -> str:
    """Why these nodes would never meet; empty where nothing is seen (fault F07)."""
    if args.nnodes < 1 or args.nproc < 1:
        return f"--nnodes is {args.nnodes} and --nproc {args.nproc}: give at least 1 (NNODES, NPROC_PER_NODE)"
    if args.nnodes == 1:
        return ""
    if args.node_rank is None:
        return f"--node-rank is missing, and NODE_RANK is not set: give 0 to {args.nnodes - 1}, a different one a node"
    if not 0 <= args.node_rank < args.nnodes:
        return f"--node-rank is {args.node_rank}: with {args.nnodes} nodes give 0 to {args.nnodes - 1}"
    if not args.endpoint:
        return (
            f"--endpoint is missing, and MASTER_ADDR is not set: {args.nnodes} nodes need HOST:PORT of node 0, "
            "or each would wait for the others at its own localhost"
        )
    host, _, port = args.endpoint.rpartition(":")
    if not host or not port.isdigit():
        return f"--endpoint is {args.endpoint!r}: give HOST:PORT"
    try:
        address = socket.getaddrinfo(host, int(port), proto=socket.IPPROTO_TCP)[0][4][0]
    except OSError as failed:
        return f"--endpoint host {host!r} cannot be resolved on {socket.gethostname()} ({failed})"
    if ipaddress.ip_address(address).is_loopback and not args.allow_loopback:
        return (
            f"--endpoint {args.endpoint} is this machine's loopback ({address}), which no other node reaches: give "
            "node 0's name in the network, or --allow-loopback where all nodes are on one machine"
        )
    return ""


def torchrun_command(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """What this node runs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(args.nnodes)]
    command += ["--nproc-per-node", str(args.nproc), "--max-restarts", str(args.max_restarts)]
    command += ["--shutdown_timeout", SHUTDOWN_SECONDS]
    if args.nnodes == 1:
        command.append("--standalone")
    else:
        # The host of the store is named outright: torchrun would guess it from this machine's addresses.
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", args.endpoint, "--rdzv-id", args.run_id]
        command += ["--node-rank", str(args.node_rank), "--rdzv-conf", f"is_host={int(args.node_rank == 0)}"]
    return [*command, "-m", "d3s_megatron.train", *rest]


def versions() -> str:
    """The versions that must agree between nodes, in one line."""
    import importlib.metadata

    import torch

    names = ("megatron-core", "transformers", "d3s_megatron")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} (not installed, run from its folder)")
    return f"Python {platform.python_version()}, torch {torch.__version__}, " + ", ".join(found)


def describe_world(expected: int) -> str:
    """What has joined, node by node; RuntimeError where it is not the expected world or versions differ; a collective.

    Args:
        expected: ranks that there should be; 0 takes whatever there is.
    """
    import torch
    import torch.distributed as dist

    device = f"{torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU"
    world: list = [None] * dist.get_world_size()
    dist.all_gather_object(world, (socket.gethostname(), os.environ.get("GROUP_RANK", "0"), device, versions()))
    nodes: dict[tuple[str, str], list[int]] = {}
    for rank, (host, group, _, _) in enumerate(world):
        nodes.setdefault((group, host), []).append(rank)
    endpoint = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    lines = [f"{len(world)} ranks on {len(nodes)} node(s), endpoint {endpoint}"]
    for (group, host), ranks in sorted(nodes.items(), key=lambda item: item[1]):
        _, _, device, version = world[ranks[0]]
        lines.append(f"  node {group} {host}: ranks {ranks[0]} to {ranks[-1]}, {len(ranks)} x {device}; {version}")
    text = "\n".join(lines)
    if expected and len(world) != expected:
        raise RuntimeError(f"launch.world_size is {expected}, but {len(world)} ranks have joined:\n{text}")
    if len({version for *_, version in world}) > 1:
        raise RuntimeError(f"nodes run different versions, install the same on all:\n{text}")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
