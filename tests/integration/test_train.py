"""The real command on tiny models: what it logs and writes, and that the recipes agree where they must."""

import json
import math

import pytest
import torch
from builders import tiny_run
from helpers import run_python
from safetensors.torch import load_file

from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.rewards.reward import STATUSES
from d3s_megatron.train import main

STEPS, PROMPTS, GROUP = 3, 4, 4


def train(inputs, out, *extra, num_processes=1):
    """Runs the command, in this process where one is enough; returns (finished process or None, log rows)."""
    model, data = inputs
    settings = tiny_run(model, data, out, STEPS)
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    done = None
    if num_processes == 1:
        main([*flags, *map(str, extra)])
    else:
        done = run_python(["-m", "d3s_megatron.train", *flags, *extra], num_processes)
        assert done.returncode == 0, done.stderr[-3000:]
    return done, [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def steps_of(rows):
    return [row for row in rows if "reward" in row]


@pytest.fixture(scope="module")
def run_tp2(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("tp2")
    done, rows = train(inputs, out / "run", "--actor.tensor_model_parallel_size", "2", num_processes=2)
    return done, rows, out / "run"


def test_every_step_logs_what_was_selected_and_what_it_cost(run_tp2):
    _, rows, _ = run_tp2
    steps = steps_of(rows)
    assert [row["N"] for row in steps] == [2, 3, 4]
    assert [row["rho"] for row in steps] == pytest.approx([0.1, 0.25, 0.4])
    for row in steps:
        assert row["num_kept"] == row["N"] * PROMPTS and row["num_rollouts"] == PROMPTS * GROUP
        assert row["num_kept_tokens"] == math.ceil(row["rho"] * row["num_scored_tokens"] - 1e-9)
        for name in (
            *("sur", "kept_share", "advantage_variance_all", "advantage_variance_kept", "effective_samples"),
            *("sign_balance", "clip_fraction", "kl", "entropy", "entropy_kept", "grad_norm", "loss"),
            *("time/rollout", "time/reward", "time/score", "time/update", "time/sync", "rewards/right"),
        ):
            assert name in row, name
        assert sum(row[f"rewards/{status}"] for status in STATUSES) == PROMPTS * GROUP  # those of all ranks
        assert row["rewards/right"] == round(row["reward"] * PROMPTS * GROUP)
    # By the schedule the last steps keep everything, so the mean over groups of their variance is that of all.
    assert steps[-1]["advantage_variance_kept"] == pytest.approx(steps[-1]["advantage_variance_all"])


def test_trainer_and_engine_agree_on_log_probs_before_and_after_updates(run_tp2):
    for row in steps_of(run_tp2[1]):
        assert row["mismatch_max"] < 1e-4


def test_the_run_folder_holds_what_the_summary_names(run_tp2):
    from d3s_megatron.config import parse_config

    done, rows, out = run_tp2
    summary = json.loads((out / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "train_seconds", "tokens_generated", "tokens_trained"} <= set(summary)
    assert summary["tokens_trained"] == sum(row["num_kept_tokens"] for row in steps_of(rows))
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("events*"))
    config = parse_config([str(out / "config.yaml")])
    assert config.train.steps == STEPS and config.actor.tensor_model_parallel_size == 2
    for name in ("log.jsonl", "plot.png", "export", "summary.json"):
        assert str(out / name) in done.stdout
    assert "Warning" not in done.stderr, done.stderr


def test_the_exported_folder_is_an_ordinary_hugging_face_model(run_tp2, inputs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = run_tp2[2] / "export"
    model, before = AutoModelForCausalLM.from_pretrained(out), load_file(inputs[0] / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(after[name].shape == before[name].shape for name in before)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    ids = AutoTokenizer.from_pretrained(out)("1+2=", return_tensors="pt")["input_ids"]
    assert model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_keeping_everything_is_grpo_bit_for_bit_and_a_run_repeats_itself(inputs, tmp_path):
    everything = [
        *("--algorithm.kept_per_prompt_init", GROUP, "--algorithm.token_share_init", "1.0"),
        *("--algorithm.token_share_final", "1.0"),
    ]
    folders = {}
    for name, recipe in (("grpo", "grpo"), ("d3s", "d3s"), ("again", "d3s")):
        _, rows = train(inputs, tmp_path / name, "--algorithm.name", recipe, *everything)
        weights = load_file(tmp_path / name / "export" / "model.safetensors")
        folders[name] = weights, [(row["loss"], row["grad_norm"]) for row in steps_of(rows)]
    for name in ("d3s", "again"):
        assert folders[name][1] == folders["grpo"][1]
        for key, tensor in folders["grpo"][0].items():
            assert torch.equal(folders[name][0][key], tensor), key


@pytest.mark.parametrize("name", ["grpo", "gspo+pods"])
def test_scores_from_the_update_are_those_of_a_pass_before_it(name, inputs, tmp_path, monkeypatch):
    passes, score = [], MegatronActor.score
    monkeypatch.setattr(MegatronActor, "score", lambda self, *a, **k: passes.append(len(a[0])) or score(self, *a, **k))
    flags = ["--algorithm.name", name, "--algorithm.kl_beta", "0"]
    runs = []
    for in_update in ("true", "false"):
        passes.clear()
        _, rows = train(inputs, tmp_path / in_update, *flags, "--actor.score_in_update", in_update)
        weights = load_file(tmp_path / in_update / "export" / "model.safetensors")
        without = [in_update == "false" or row["num_updates"] == 0 for row in steps_of(rows)]  # nothing to learn from
        assert len(passes) == sum(without)
        runs.append(([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows], weights))
    for row, other in zip(*(rows for rows, _ in runs), strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-6, nan_ok=True)
    for tensor, other in zip(*(weights.values() for _, weights in runs), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["d3s", "grpo"])  # scored before the update, and by it where there is one
def test_a_step_whose_rewards_are_all_equal_is_skipped_and_said(name, inputs, tmp_path, capsys):
    """Fault D19."""
    flags = ["--rewards.kind", "reward_functions:never", "--algorithm.kl_beta", "0", "--algorithm.name", name]
    _, rows = train(inputs, tmp_path / "run", *flags)
    assert [row["num_updates"] for row in steps_of(rows)] == [0] * STEPS
    assert all(row["entropy"] > 0 and row["mismatch_mean"] < 1e-4 for row in steps_of(rows))
    assert capsys.readouterr().out.count("no update") == STEPS
    before, after = (load_file(f / "model.safetensors") for f in (inputs[0], tmp_path / "run" / "export"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_rollout_without_a_verdict_leaves_its_group_and_is_counted(inputs, tmp_path):
    """Fault D05."""
    _, rows = train(inputs, tmp_path / "run", "--rewards.kind", "reward_functions:breaks_on_odd")
    steps = steps_of(rows)
    assert sum(row["num_without_verdict"] for row in steps) > 0
    for row in steps:
        assert row["num_without_verdict"] == row["rewards/crash"]
        assert row["num_kept"] <= row["num_rollouts"] - row["num_without_verdict"]
        assert row["loss"] is None or math.isfinite(row["loss"])


@pytest.mark.parametrize("recipe", ["gspo", "pods", "d1s", "d1s-c", "d2s", "d3s-i", "gspo+d3s", "random"])
def test_every_recipe_trains(recipe, inputs, tmp_path):
    _, rows = train(inputs, tmp_path / "run", "--algorithm.name", recipe, "--train.steps", "2")
    assert all(row["num_updates"] == 1 and row["grad_norm"] > 0 for row in steps_of(rows))


def test_minibatches_epochs_and_current_entropy(inputs, tmp_path):
    _, rows = train(
        inputs,
        tmp_path / "run",
        *("--algorithm.num_minibatches", "2", "--algorithm.num_epochs", "2", "--algorithm.token_entropy", "current"),
        *("--algorithm.kl_tokens", "all", "--algorithm.dual_clip", "3.0", "--algorithm.loss_normalization", "dr_grpo"),
    )
    assert [row["num_updates"] for row in steps_of(rows)] == [4] * STEPS


@pytest.mark.parametrize("truncated", ["wrong", "exclude"])
def test_answers_cut_at_the_limit_are_wrong_or_left_out(truncated, inputs, tmp_path):
    """Method 4, row 24: hardly an answer ends by its first token here."""
    extra = ["--algorithm.truncated", truncated, "--rollout.max_new_tokens", "1", "--train.steps", "1"]
    _, rows = train(inputs, tmp_path / "run", *extra, "--rewards.kind", "reward_functions:always")
    (row,) = steps_of(rows)
    assert row["truncated_share"] > 0.8
    cut = round(row["truncated_share"] * row["num_rollouts"])
    assert row["num_without_verdict"] == (cut if truncated == "exclude" else 0)
    assert row["reward"] == pytest.approx(1.0 if truncated == "exclude" else 1 - row["truncated_share"])
