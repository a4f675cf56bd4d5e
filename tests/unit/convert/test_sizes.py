"""Sizes as people write them."""

import pytest

from d3s_megatron.convert.checkpoint.sizes import parse_size, size_text


def test_sizes_are_written_and_read():
    assert [size_text(n) for n in (0, 999, 1000, 3_087_467_136, 141_000_000_000)] == [
        "0 B",
        "999 B",
        "1.00 KB",
        "3.09 GB",
        "141.00 GB",
    ]
    assert [parse_size(text) for text in ("7", "5GB", "1.5 mb", "2TB")] == [7, 5 * 10**9, 1_500_000, 2 * 10**12]
    for text in ("0", "-1", "5GiB", "", "many"):
        with pytest.raises(ValueError, match="write it like 5GB"):
            parse_size(text)
