"""What runs of these tests start from."""

import pytest
from builders import addition_file, tiny_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """(model folder, data file) of a tiny run."""
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_model(folder / "model"), addition_file(folder / "train.jsonl")
