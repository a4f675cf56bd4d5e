"""d3s_megatron.train with one fault made to happen: `FAULT="kind rank step phase" fault_worker.py ARGUMENTS`.

The fault happens in the first start only: kill (SIGKILL to itself), raise, sleep (for good), or orphan (SIGKILL to its
launcher, then sleep). Where a rank is to sleep, the watch's minutes are tenths of seconds in that phase, on every rank:
short as a test wants them, and too long for what comes before on a slow machine.
"""

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace

from torch.distributed.elastic.multiprocessing.errors import record

from d3s_megatron import train
from d3s_megatron.report.run_log import StageClock

KIND, RANK, STEP, PHASE = os.environ["FAULT"].split()


def strike() -> None:
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "raise":
        raise RuntimeError("a made-up fault")
    if KIND == "orphan":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


class FaultyClock(StageClock):
    step = -1

    def __init__(self, entered):
        super().__init__(entered)
        FaultyClock.step += 1
        self._watch = entered.func.__self__

    @contextlib.contextmanager
    def __call__(self, stage):
        with super().__call__(stage):
            if (stage, FaultyClock.step) == (PHASE, int(STEP)):
                if KIND == "sleep":
                    minutes = self._watch._settings
                    self._watch._settings = replace(
                        minutes, stall_minutes=minutes.stall_minutes / 600, end_minutes=minutes.end_minutes / 600
                    )
                if os.environ.get("RANK", "0") == RANK:
                    strike()
            yield


if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    train.StageClock = FaultyClock

if __name__ == "__main__":
    record(train.main)(sys.argv[1:])
