"""D3S with vLLM rollouts, colocated with a TP 2 actor in the same two processes: an engine each, and one over both."""

import json

import pytest
from builders import addition_file, tiny_model, tiny_run
from helpers import run_python

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs these in an environment of its own")

from d3s_megatron.audit.rollouts import load_rollouts  # noqa: E402

STEPS = 4  # 4 of 12 prompts each: the last one has prompts whose lengths are known


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(engine_ranks, steps): step rows and folder of a run, made once; with more steps, from its checkpoint on."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny_model(folder / "model", hidden_size=128, intermediate_size=64)
    data = addition_file(folder / "train.jsonl")
    known = {}

    def run(engine_ranks, steps=STEPS):
        out = folder / f"run{engine_ranks}"
        if (engine_ranks, steps) not in known:
            flags = tiny_run(model, data, out, steps) | {
                "rollout.engine": "vllm",
                "rollout.vllm_tensor_parallel": engine_ranks,
                "rollout.max_batch_size": 16,
                "actor.tensor_model_parallel_size": 2,
                "audit.rollouts": "all",
                "checkpoint.every": STEPS if engine_ranks == 1 else 0,
                "optimizer.lr": 1e-2,  # large, so that stale weights would show
                "train.eval_samples": 1,
                "train.export": "false",
            }
            args = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
            done = run_python(["-m", "d3s_megatron.train", *args], 2)
            assert done.returncode == 0, done.stderr[-3000:]
            rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
            known[engine_ranks, steps] = [row for row in rows if "reward" in row], out
        return known[engine_ranks, steps]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield run


@pytest.mark.parametrize("engine_ranks", [1, 2])
def test_engine_and_actor_agree_at_every_step(train, engine_ranks):
    rows, _ = train(engine_ranks)
    assert len(rows) == STEPS
    assert all(row["num_updates"] == 1 and row["mismatch_max"] < 1e-3 and row["sync_mismatch"] < 1e-3 for row in rows)


def test_two_engines_give_the_answers_of_one(train):
    """Before the first update, from which on the weights differ in their last bits."""
    one, two = (load_rollouts(train(engine_ranks)[1], 0)[0] for engine_ranks in (2, 1))
    answers = {r.request.uid: r.token_ids for r in one}
    assert len(answers) == 16 and answers == {r.request.uid: r.token_ids for r in two}
    assert len({r.token_ids for r in one if r.request.group_id == 0}) > 1


def test_the_first_rollout_after_resume_is_of_the_trainers_weights(train):
    """Fault G04: the engine itself starts with the weights of the folder."""
    train(1)
    rows, _ = train(1, STEPS + 1)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[-1]["num_updates"] == 1 and rows[-1]["mismatch_max"] < 1e-3
