"""`python -m d3s_megatron.ops`: which backend runs, on what, and why something is missing."""

from __future__ import annotations

from d3s_megatron.ops import extension


def report() -> list[str]:
    """The state of the ops, one fact a line."""
    ext = extension.module()
    if ext is None:
        return [
            "backend          reference (plain torch)",
            f"extension        missing: {extension.why_missing()}",
            f"remedy           {extension.REMEDY}",
        ]
    state = ext.state()
    return ["backend          extension", *(f"{key:<16} {value}" for key, value in state.items())]


if __name__ == "__main__":
    print("\n".join(report()))
