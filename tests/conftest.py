"""Lets test files import tests/builders.py and tests/helpers.py, keeps tests off the network and without chance."""

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no fault of the code: no deadline, and no complaint about slow draws. And no example is met by
# chance: all are drawn from fixed seeds, unless D3S_SEARCH asks for new ones.
settings.register_profile(
    "d3s",
    deadline=None,
    derandomize=not os.environ.get("D3S_SEARCH"),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("d3s")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """What draws without a seed draws the same, whichever tests ran before it in this process."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
