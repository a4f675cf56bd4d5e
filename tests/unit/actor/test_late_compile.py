"""Compilation waits for the first call, and is then torch's own."""

import torch
from ranks import run_ranks

from d3s_megatron.actor.late_compile import late_compile


def test_a_function_is_compiled_at_its_first_call():
    compiled, right = [], torch.compile

    def plus_one(x):
        compiled.append(torch.compiler.is_compiling())
        return x + 1

    with late_compile():
        late = torch.compile(plus_one)
        assert torch.compile is not right
    assert torch.compile is right and late.__name__ == "plus_one" and late.__wrapped__ is plus_one
    with torch.compiler.set_stance("force_eager"):  # no C++ compiler for this
        assert late(torch.ones(2)).tolist() == [2, 2]
    assert len(compiled) == 1


def test_the_command_starts_without_the_compiler(tmp_path):
    (tmp_path / "modules.py").write_text(
        "import sys, d3s_megatron.train; print('torch._inductor.compile_fx' in sys.modules)"
    )
    assert run_ranks([tmp_path / "modules.py"]).stdout == "False\n"
