"""A saved step runs again without an engine, bit for bit; the audit's numbers are the log's; both survive a resume."""

import json
import shutil

import pytest
import torch
from builders import tiny_run
from ranks import run_ranks

from d3s_megatron.audit import read_audit
from d3s_megatron.replay import main as replay
from d3s_megatron.train import main as train

STEPS, NUM = 4, 16
EVERY = {"checkpoint.every": 3, "audit.tokens_every": 2, "algorithm.drop_zero": "true", "audit.rollouts": "all"}


def flags(inputs, out, **changes):
    settings = tiny_run(*inputs, out, STEPS) | EVERY | changes
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    train(flags(inputs, out))
    return out


def rows_of(run):
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "progress" in row}


def audit_of(run, step):
    return read_audit(run / "audit" / f"step-{step + 1:06d}.parquet")


def test_the_audit_of_every_step_says_what_the_log_says(run):
    for step, row in rows_of(run).items():
        audit = audit_of(run, step)
        columns = {name: audit.table[name].to_pylist() for name in audit.table.column_names}
        assert columns["uid"] == list(range(NUM)) and row["num_rollouts"] == NUM
        assert {k: v for k, v in row.items() if k in audit.meta["row"]} == audit.meta["row"]
        assert sum(columns["kept"]) == row["num_kept"] == audit.meta["reasons"].get("kept", 0)
        assert sum(columns["num_kept_tokens"]) == row["num_kept_tokens"] == sum(audit.meta["histogram"]["kept"])
        assert sum(audit.meta["histogram"]["all"]) == row["num_scored_tokens"]
        assert torch.tensor(columns["reward"]).double().mean().item() == row["reward"]
        assert torch.tensor(columns["length"]).double().mean().item() == row["response_length"]
        kept = torch.tensor([a for a, k in zip(columns["advantage"], columns["kept"], strict=True) if k]).double()
        assert row["advantage_variance_kept"] == pytest.approx(float(kept.var()) if len(kept) > 1 else 0.0)
        assert columns["status"].count("right") == row["rewards/right"]
        assert all((reason == "kept") == k for reason, k in zip(columns["reason"], columns["kept"], strict=True))


def test_tokens_are_shown_with_scores_and_the_threshold_parts_them(run):
    with_tokens = [step for step in range(STEPS) if audit_of(run, step).meta["prompts"]]
    assert with_tokens == [0, 2, 3]  # every second step and the last
    for step in with_tokens:
        audit = audit_of(run, step)
        prompts = audit.meta["prompts"]
        assert len(prompts) == 3 and all(p["text"].endswith("=") for p in prompts.values())
        for row in audit.table.to_pylist():
            assert (row["pieces"] is not None) == (str(row["group"]) in prompts)
            if row["pieces"] is None:
                continue
            assert len(row["pieces"]) == len(row["token_ids"]) == row["length"]
            assert (row["score"] is not None) == row["kept"]
            if row["kept"]:
                assert sum(row["token_kept"]) == row["num_kept_tokens"]
                for score, entropy, kept in zip(row["score"], row["entropy"], row["token_kept"], strict=True):
                    assert score == pytest.approx(abs(row["advantage"]) * entropy, rel=2e-4)
                    assert score >= audit.meta["threshold"] if kept else score <= audit.meta["threshold"]


@pytest.mark.parametrize("step", [1, 4])  # from the first weights, and from the checkpoint after step 3
def test_a_replay_is_the_step_bit_for_bit(run, step, capfd):
    assert replay([str(run), "--step", str(step)]) == 0
    said = capfd.readouterr().out
    assert "equal in all bits" in said and "other" not in said
    assert f"after step {0 if step == 1 else 3}" in said
    assert said.count("same bits") == 3  # kept tokens, gradients, weights


def test_a_replay_takes_the_steps_since_the_checkpoint_again(run, tmp_path, capfd):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    shutil.rmtree(moved / "checkpoints")
    assert replay([str(moved), "--step", "3"]) == 0
    assert "taken again before it: 2 steps, 2 equal the log in all bits" in capfd.readouterr().out


def test_a_replay_that_is_not_the_original_says_where(run, tmp_path, capfd):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    log = (moved / "log.jsonl").read_text()
    row = rows_of(run)[3]
    (moved / "log.jsonl").write_text(log.replace(json.dumps(row["loss"]), json.dumps(row["loss"] * (1 + 1e-12))))
    assert replay([str(moved), "--step", "4"]) == 1
    assert "not equal: loss" in capfd.readouterr().out


def test_another_selection_on_the_same_rollouts(run, tmp_path, capfd):
    out = tmp_path / "replay.json"
    assert replay([str(run), "--step", "4", "--algorithm", "pods", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["original"] == rows_of(run)[3]
    assert found["replay"]["num_kept"] <= 8 and found["replay"]["N"] == 2  # PODS keeps the first N
    assert found["replay"]["num_kept_tokens"] == found["replay"]["num_scored_tokens"]
    assert set(found["replay_kept"]) != set(found["original_kept"])
    assert "pods" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--step", "9"], "has steps 1 to 4"),
        (["--step", "2", "--train.seed", "1"], "cannot be changed in a replay"),
        (["--step", "2", "--algorithm", "nothing"], "use one of"),
    ],
)
def test_what_cannot_be_replayed_is_said(run, extra, message, capfd):
    with pytest.raises(SystemExit) as ended:
        replay([str(run), *extra])
    assert ended.value.code == 2 and message in capfd.readouterr().err


def test_a_resumed_run_has_one_audit_a_step_and_the_same_ones(inputs, run, tmp_path):
    """What the process that was cut had written of later steps is dropped or written again."""
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "summary.json").unlink()
    later = out / "audit" / "step-000004.parquet"
    later.write_bytes(b"of the process that was cut")
    shutil.copy(out / "audit" / "step-000001.parquet", out / "audit" / "step-000009.parquet")
    (out / "checkpoints" / "step-000004").rename(tmp_path / "gone")
    train(flags(inputs, out))
    assert sorted(p.name for p in (out / "audit").iterdir()) == sorted(p.name for p in (run / "audit").iterdir())
    again, before = audit_of(out, 3), audit_of(run, 3)
    assert again.table.equals(before.table) and again.meta == before.meta


def test_recent_keeps_rollouts_since_the_oldest_checkpoint_and_off_writes_nothing(inputs, tmp_path):
    train(
        flags(inputs, tmp_path / "recent", **{"audit.rollouts": "recent", "checkpoint.every": 1, "checkpoint.keep": 2})
    )
    assert sorted(p.name[:11] for p in (tmp_path / "recent" / "rollouts").iterdir()) == ["step-000003", "step-000004"]
    train(flags(inputs, tmp_path / "off", **{"audit.rollouts": "none", "audit.every": 0, "checkpoint.every": 0}))
    assert not list((tmp_path / "off" / "audit").iterdir()) and not list((tmp_path / "off" / "rollouts").iterdir())


BOTH = """
import json, sys
from pathlib import Path
from d3s_megatron.replay import main as replay
from d3s_megatron.train import main as train
if __name__ == "__main__":  # the reward's workers are spawned
    settings, out = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    train(settings)
    sys.exit(replay([out, "--step", "1"]))
"""


def test_two_data_parallel_ranks_write_the_audit_of_one_and_replay_together(inputs, run, tmp_path):
    out = tmp_path / "run"
    (tmp_path / "both.py").write_text(BOTH)
    settings = flags(inputs, out, **{"train.steps": 1, "audit.tokens_every": 1})
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    done = run_ranks([tmp_path / "both.py", tmp_path / "settings.json", out], 2)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("equal in all bits") == 1
    assert len(list((out / "rollouts").iterdir())) == 2
    mine, whole = audit_of(out, 0), audit_of(run, 0)
    same = ("uid", "prompt_id", "reward", "status", "advantage", "length", "kept", "token_ids", "token_kept")
    for name in same:
        assert mine.table[name].to_pylist() == whole.table[name].to_pylist(), name
    assert sum(mine.meta["histogram"]["all"]) == sum(whole.meta["histogram"]["all"])
