"""Jobs and servers, with servers that stop at any point."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d3s_megatron.rollout.dispatch import ExpectedLengths, Lost, NoServerLeft, dispatch
from d3s_megatron.types import Prompt, Request, Rollout


@settings(deadline=None)  # threads
@given(st.integers(0, 12), st.dictionaries(st.sampled_from("abc"), st.integers(0, 6), min_size=1), st.integers(1, 3))
def test_every_job_is_done_while_a_server_is_left(num_jobs, strength, slots):
    """`strength` is the number of jobs after which a server is gone; "a" stays where it is not named."""
    lock, did, lost = threading.Lock(), {}, []

    def do(server, job):
        with lock:
            if did.get(server, 0) >= strength.get(server, num_jobs + 1):
                raise Lost("gone")
            did[server] = did.get(server, 0) + 1
        return server, job

    servers = dict.fromkeys({"a", *strength}, slots)
    try:
        results = dispatch(range(num_jobs), servers, do, lambda server, why: lost.append(server))
        assert [job for _, job in results] == list(range(num_jobs))
    except NoServerLeft:
        assert sorted(lost) == sorted(servers) and sum(did.values()) < num_jobs
    assert len(set(lost)) == len(lost)


def test_jobs_begin_in_order():
    begun = []
    dispatch(list("hgfedcba"), {"one": 1}, lambda server, job: begun.append(job), lambda *_: None)
    assert begun == list("hgfedcba")


def test_any_other_failure_ends_the_whole():
    def do(server, job):
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        dispatch([1, 2], {"a": 2, "b": 1}, do, lambda *_: None)


def test_lengths_are_expected_from_a_prompts_own_answers_first():
    lengths = ExpectedLengths()
    assert lengths("new") == 0

    def answer(prompt_id, num_tokens):
        request = Request(0, 0, Prompt(prompt_id, "", (1,), ""), 0)
        return Rollout(request, (1,) * num_tokens, (0.0,) * num_tokens, "stop", "")

    lengths.add([answer("long", 10), answer("long", 20), answer("short", 3)])
    assert (lengths("long"), lengths("short"), lengths("new")) == (15, 3, 11)
