"""The parts of the audit that need no run: reasons, pieces of text, shown prompts, files."""

import pyarrow as pa
import pytest
import torch
from builders import tokenizer
from hypothesis import given
from hypothesis import strategies as st

from d3s_megatron.algorithms.config import AlgorithmConfig
from d3s_megatron.algorithms.recipes import make_recipe
from d3s_megatron.audit.files import drop_from, drop_rollouts_before, write_table
from d3s_megatron.audit.gather import bits_of, floats_of
from d3s_megatron.audit.pieces import Pieces, clean
from d3s_megatron.audit.reasons import CUT, KEPT, NO_VERDICT, reasons
from d3s_megatron.audit.rollouts import load_rollouts, save_rollouts
from d3s_megatron.audit.writer import shown_groups
from d3s_megatron.types import Experience, Prompt, Request, Rollout, Verdict

NAN = float("nan")


def experience(rewards, truncated=None):
    num = len(rewards)
    cut = torch.tensor(truncated or [False] * num)
    return Experience.new(0, 0, torch.arange(num) // 4, torch.tensor(rewards), torch.ones(num, dtype=torch.int64), cut)


@pytest.mark.parametrize("name", ["grpo", "pods", "d1s", "d3s", "random"])
def test_every_rollout_has_one_reason_and_kept_ones_the_reason_kept(name):
    judged = experience([1, 0, 0, 0, 1, 1, 0, NAN, NAN, 1, 1, 1], [False] * 7 + [True] + [False] * 4)
    config = AlgorithmConfig(
        name=name, samples_per_prompt=4, kept_per_prompt_init=2, kept_per_prompt_final=4, drop_zero=True
    )
    recipe = make_recipe(config)
    selected = recipe.apply(judged, 2)
    names, which = reasons(recipe, judged, selected, 2)
    found = [names[i] for i in which.tolist()]
    kept = selected.kept.tolist()
    assert [reason == KEPT for reason in found] == kept
    assert found[7] == CUT and found[8] == NO_VERDICT
    assert not set(found) & {""}
    assert ("advantage is zero" in found) == any(
        not k and names[w] == "advantage is zero" for k, w in zip(kept, which.tolist(), strict=True)
    )


def test_a_dropped_rollout_names_the_part_that_dropped_it():
    judged = experience([1, 0, 0, 0, 1, 1, 1, 1])
    config = AlgorithmConfig(name="d3s", samples_per_prompt=4, kept_per_prompt_init=2, kept_per_prompt_final=2)
    recipe = make_recipe(config)
    names, which = reasons(recipe, judged, recipe.apply(judged, 2), 2)
    dropped = {names[i] for i in which.tolist()} - {KEPT}
    assert dropped == {"not in the subset of the batch with the largest advantage variance"}


class Bytes:
    """A tokenizer whose tokens are bytes, as byte-level ones have for rare characters."""

    all_special_ids = ()

    def __len__(self):
        return 256

    def decode(self, ids, **_):
        return bytes(ids).decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_pieces_together_are_the_text(text):
    ids = list(text.encode("utf-8", "ignore"))
    pieces = Pieces(Bytes()).of(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == bytes(ids).decode()


def test_pieces_of_a_character_tokenizer_with_its_special_tokens():
    assert Pieces(tokenizer()).of([1, 10, 2, 12]) == ["1", "+", "2", "<eos>"]


def test_lone_surrogates_become_question_marks():
    assert clean("a\ud800b") == "a?b"


@given(st.lists(st.floats(allow_nan=False), max_size=5))
def test_floats_travel_as_their_bits(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(floats_of(bits_of(tensor)), tensor)


def test_shown_prompts_go_from_most_kept_to_least():
    kept = torch.tensor([0, 0, 0, 0] + [1, 1, 1, 1] + [1, 1, 0, 0] + [1, 0, 0, 0], dtype=torch.bool)
    base = experience([0.0] * 16)
    selected = Experience(**{**vars(base), "kept": kept})
    assert shown_groups(selected, 1) == [1]
    assert shown_groups(selected, 2) == [0, 1]
    assert shown_groups(selected, 9) == [0, 1, 2, 3]


def rollouts(uids, group=0):
    prompt = Prompt("p", "1+2=", (1, 10, 2, 11), "3")
    return [Rollout(Request(u, group, prompt, 7), (u, 3), (-0.1 * u, -1e-9), "length", "x") for u in uids]


def test_saved_rollouts_come_back_as_the_trainer_reads_them_for_any_number_of_ranks(tmp_path):
    (tmp_path / "rollouts").mkdir()
    verdicts = [Verdict(1.0, "right"), Verdict(NAN, "timeout")]
    save_rollouts(tmp_path, 4, 0, 2, rollouts([0, 1]), verdicts)
    with pytest.raises(ValueError, match="from 1 of 2 ranks"):
        load_rollouts(tmp_path, 4)
    save_rollouts(tmp_path, 4, 1, 2, [], [])
    found, judged = load_rollouts(tmp_path, 4)
    assert [r.request.uid for r in found] == [0, 1] and [v.status for v in judged] == ["right", "timeout"]
    assert judged[0].value == 1.0 and judged[1].value != judged[1].value
    assert found[1].request.prompt.token_ids == (1, 10, 2, 11) and found[1].token_ids == (1, 3)
    assert found[1].log_probs == tuple(torch.tensor((-0.1, -1e-9)).tolist())
    shares = [load_rollouts(tmp_path, 4, rank, 2)[0] for rank in range(2)]
    assert [len(share) for share in shares] == [2, 0]
    with pytest.raises(ValueError, match="no rollouts of step 6"):
        load_rollouts(tmp_path, 5)


def test_files_of_later_steps_and_half_written_ones_go(tmp_path):
    for kind in ("audit", "rollouts"):
        (tmp_path / kind).mkdir()
    for step in (1, 2, 3):
        write_table(pa.table({"a": [1]}), {"x": 1}, tmp_path / "audit" / f"step-{step:06d}.parquet")
        write_table(pa.table({"a": [1]}), {"x": 1}, tmp_path / "rollouts" / f"step-{step:06d}.rank-00000.arrow")
    (tmp_path / "audit" / ".step-000004.parquet.new").write_text("half")
    assert drop_from(tmp_path, 2) == 3
    assert drop_rollouts_before(tmp_path, 1) == 1
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["step-000001.parquet", "step-000002.parquet", "step-000002.rank-00000.arrow"]


def test_a_number_that_is_not_finite_is_refused_in_the_record(tmp_path):
    with pytest.raises(ValueError):
        write_table(pa.table({"a": [1]}), {"x": NAN}, tmp_path / "step-000001.parquet")
