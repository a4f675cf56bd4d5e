"""The worker pool with real processes: it survives what its judges do, and leaves nothing behind."""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from helpers import HANG_SECONDS

from d3s_megatron.rewards import pool as pool_module
from d3s_megatron.rewards.pool import Judged, WorkerPool

JUDGE = "sample_judges:obey"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def pool():
    """For answers that end: on any machine, however busy, before this deadline."""
    with closing(WorkerPool(JUDGE, num_workers=2, deadline_seconds=HANG_SECONDS, memory_limit_mb=1024)) as pool:
        yield pool


def say(*values):
    return [(f"say {value}", "") for value in values]


def descendants():
    """Process id -> status of everything below this process."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = child.status()
        except psutil.NoSuchProcess:
            pass  # it ended between the two calls
    return found


def wait_for_end(pids):
    """The ones of `pids` that are still there after all patience."""
    deadline = time.monotonic() + HANG_SECONDS
    while (alive := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def test_results_come_in_order(pool):
    draw = random.Random(0)
    items = [(f"say {k}", "") if draw.random() < 0.9 else ("sleep 0.05", "") for k in range(300)]
    expected = [float(text.split()[1]) if text.startswith("say") else 1.0 for text, _ in items]
    assert [result.value for result in pool.map(items)] == expected


def test_no_items(pool):
    assert pool.map([]) == []


def test_hanging_answers_time_out_side_by_side_and_the_rest_is_judged(tmp_path):
    """One in eight of 64: each has a process of its own for both of its tries."""
    marks = {k: tmp_path / str(k) for k in range(0, 64, 8)}
    items = [("spin" if k == 8 else "sleep 2000", str(marks[k])) if k in marks else (f"say {k}", "") for k in range(64)]
    with closing(WorkerPool(JUDGE, num_workers=2, deadline_seconds=12.0, memory_limit_mb=1024)) as pool:
        results = pool.map(items)
    assert [result.value for result in results] == [None if k in marks else float(k) for k in range(64)]
    assert {results[k].status for k in marks} == {"timeout"}
    tries = [mark.read_text().splitlines() for mark in marks.values()]
    assert all(len(set(pids)) >= 2 for pids in tries)  # once more, in another process
    # Only a worker that was slow with another answer before may begin one that has been handed on by then.
    assert len(set().union(*tries)) >= 2 * len(marks)


@pytest.mark.parametrize("verb", ["die", "grow", "raise", "recurse", "nan"])
def test_a_crash_is_tried_once_more(pool, verb, tmp_path):
    mark = tmp_path / "tries"
    results = pool.map([*say(1), (verb, str(mark)), *say(2)])
    assert results[0].value == 1 and results[2].value == 2
    assert results[1] == Judged(None, "crash")
    assert len(mark.read_text().splitlines()) == 2


def test_reasons_of_crashes_are_logged_once_a_batch(pool, caplog):
    pool.map([("raise", "")] * 10)
    assert [record.getMessage() for record in caplog.records] == [
        "judging crashed 20 times in a batch of 10 answers: RuntimeError: on purpose"
    ]


def test_a_second_try_may_succeed(pool, tmp_path):
    assert pool.map([("once", str(tmp_path / "tries"))]) == [Judged(1.0, "right")]


def test_statuses_of_a_judge_are_kept(pool):
    assert pool.map([("none", ""), *say(0, 0.5)]) == [
        Judged(0.0, "no_answer"),
        Judged(0.0, "wrong"),
        Judged(0.5, "right"),
    ]


def test_workers_do_not_import_torch(pool):
    assert pool.map([("torch", "")])[0].value == 0.0


def test_what_a_judge_prints_is_not_our_output(pool, capfd):
    assert pool.map([("print", "")])[0].value == 1.0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("text", ["\ud800 lone surrogate", "\x00", "x" * (1 << 22), "πé漢"])
def test_any_text_reaches_the_judge(text):
    pool = WorkerPool("sample_judges:length", 1, HANG_SECONDS, 0)
    try:
        assert pool.map([(text, "2")])[0].value == len(text) / 2
    finally:
        pool.close()


def test_it_works_from_threads(pool):
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(pool.map, say(*range(10 * k, 10 * k + 10))) for k in range(8)]
        for k, call in enumerate(calls):
            assert [result.value for result in call.result()] == list(range(10 * k, 10 * k + 10))


def test_it_outlives_the_thread_that_made_it():
    pools = []
    thread = threading.Thread(target=lambda: pools.append(WorkerPool(JUDGE, 1, HANG_SECONDS, 0)))
    thread.start()
    thread.join()
    pools[0].map(say(1))
    time.sleep(0.2)
    assert pools[0].map(say(1, 2)) == [Judged(1.0, "right"), Judged(2.0, "right")]
    pools[0].close()


def test_workers_are_reused_and_replaced(monkeypatch):
    monkeypatch.setattr(
        pool_module, "_SLOW_SECONDS", HANG_SECONDS
    )  # on a loaded machine others would step in for slow ones
    with closing(WorkerPool(JUDGE, num_workers=2, deadline_seconds=HANG_SECONDS, memory_limit_mb=0)) as pool:
        assert len({result.value for result in pool.map([("pid", "")] * 20)}) <= 2
        monkeypatch.setattr(pool_module, "ANSWERS_PER_WORKER", 5)
        monkeypatch.setattr(pool_module, "MOST_AT_ONCE", 1)
        assert len({result.value for result in pool.map([("pid", "")] * 40)}) >= 8


def test_no_process_is_left_and_none_is_a_zombie():
    strangers = set(descendants())  # what other tests of this process have started
    pool = WorkerPool(JUDGE, num_workers=2, deadline_seconds=2.0, memory_limit_mb=1024)
    pool.map([("die", ""), ("spin", ""), ("raise", ""), *say(*range(50))])
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        ours = {pid: status for pid, status in descendants().items() if pid not in strangers}
        if len(ours) <= 3 and psutil.STATUS_ZOMBIE not in ours.values():
            break  # the nursery and the idle workers are left
        time.sleep(0.02)
    else:
        pytest.fail(f"processes are left: {ours}")
    pool.close()
    assert not wait_for_end(ours)


def test_kills_leave_no_descriptor_open(pool):
    pool.map([("die", "")] * 3)
    before = len(os.listdir("/proc/self/fd"))
    pool.map([("die", "")] * 20)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_killed_worker_and_a_killed_nursery_are_replaced(pool):
    (worker,) = {int(result.value) for result in pool.map([("pid", "")])}
    os.kill(worker, signal.SIGKILL)
    assert pool.map(say(1))[0].value == 1
    ours = [child for child in psutil.Process().children() if "rewards.nursery" in " ".join(child.cmdline())]
    max(ours, key=lambda child: child.create_time()).kill()
    assert pool.map(say(1, 2, 3)) == [Judged(value, "right") for value in (1.0, 2.0, 3.0)]


def test_a_closed_pool_says_so(pool):
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.map(say(1))


@pytest.mark.parametrize("judge", ["no_such_module:f", "sample_judges:no_such_function", "sample_judges:os"])
def test_a_judge_that_cannot_be_loaded_is_one_clear_error(judge):
    with pytest.raises(ValueError, match=f"cannot load '{judge}'"):
        WorkerPool(judge, 1, 1.0, 0)


ORPHANS = """
import sys
sys.path[:0] = {path!r}
from d3s_megatron.rewards.pool import WorkerPool
from pathlib import Path
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background would pass on "ignore"
pool = WorkerPool("sample_judges:obey", 2, 3600.0, 0)
pool.map([("pid", "")] * 4)
mark = Path(sys.argv[1])
threading.Thread(target=pool.map, args=([("spin", str(mark))] * 3,), daemon=True).start()
while not mark.exists() or len(set(mark.read_text().splitlines())) < 2:
    time.sleep(0.02)
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nobody_outlives_the_trainer(ending, tmp_path):
    script = ORPHANS.format(path=[str(ROOT), str(Path(__file__).parent)])
    command = [sys.executable, "-c", script, str(tmp_path / "begun")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert trainer.stdout is not None and trainer.stdout.readline() == b"ready\n"
    family = [child.pid for child in psutil.Process(trainer.pid).children(recursive=True)]
    assert len(family) >= 3  # the nursery and two spinning workers
    trainer.send_signal(ending)
    trainer.wait()
    trainer.stdout.close()
    assert not wait_for_end(family)


def test_nan_is_never_a_value(pool):
    assert not any(isinstance(r.value, float) and math.isnan(r.value) for r in pool.map([("nan", ""), *say(1)]))


def test_a_process_with_many_open_files_may_have_a_pool():
    """Descriptors from 1,024 on are beyond what select() can wait for."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"no more than {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        pool = WorkerPool(JUDGE, num_workers=1, deadline_seconds=HANG_SECONDS, memory_limit_mb=1024)
        assert [result.value for result in pool.map(say(1, 2))] == [1.0, 2.0]
        pool.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
