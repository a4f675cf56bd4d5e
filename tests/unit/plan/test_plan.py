"""The planner against instantiated models: parameters, gradients and optimizer exactly, activations within 10%."""

import pytest
import torch
import torch.distributed as dist
from builders import tiny_model
from megatron.core import parallel_state, tensor_parallel
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from d3s_megatron.actor import cpu_device
from d3s_megatron.actor.attention import pack_row
from d3s_megatron.actor.checkpoint import _make_moments, num_bytes
from d3s_megatron.actor.config import ActorConfig, OptimizerConfig
from d3s_megatron.actor.context import own_positions
from d3s_megatron.actor.megatron_actor import MegatronActor
from d3s_megatron.actor.model import DTYPES, build_model
from d3s_megatron.actor.parallel import Layout as ActorLayout
from d3s_megatron.actor.parallel import init_parallel, shutdown
from d3s_megatron.convert import read_shape
from d3s_megatron.plan.cost import Machine, Work, step_times
from d3s_megatron.plan.memory import (
    Layout,
    gradient_bytes,
    layer_activation_bytes,
    model_parameters,
    optimizer_bytes,
    stage_parameters,
)
from d3s_megatron.plan.models import MODELS, shape_of
from d3s_megatron.plan.search import Fixed, Rollouts, best, evaluate

SHAPES = {
    "tied-bias": ("qwen2", {"num_hidden_layers": 4}),
    "untied": ("llama", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "norms": ("qwen3", {"num_hidden_layers": 4, "head_dim": 24}),
}
CUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (1, 4, 1)]  # TP, PP, VPP


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    family, changes = SHAPES[request.param]
    return tiny_model(tmp_path_factory.mktemp(request.param) / "model", family, **changes)


@pytest.fixture(autouse=True)
def leave(request):
    """The activation tests share one group, since what a model saved keeps the group and its file descriptors."""
    shares = "activations" in request.node.name
    if not shares:
        shutdown()
    yield
    if not shares:
        shutdown()


@pytest.fixture(autouse=True, scope="module")
def leave_in_the_end():
    yield
    shutdown()


def one_rank():
    """The layout of this process alone."""
    if parallel_state.model_parallel_is_initialized():
        return ActorLayout(0, 1, 0, 1, 0, 1, 0, 1, torch.device("cpu"))
    return init_parallel(ActorConfig())


@pytest.mark.parametrize("tp, pp, vpp", CUTS)
def test_parameters_equal_those_of_an_instantiated_model_on_every_stage(folder, tp, pp, vpp):
    shape = read_shape(folder)
    config = ActorConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp
    )
    for stage in range(pp):
        # One process stands for a rank of many: nothing is sent while a model is made.
        dist.init_process_group("fake", rank=stage * tp, world_size=tp * pp, store=FakeStore())
        cpu_device.install()
        with cpu_device.as_cpu():
            parallel_state.initialize_model_parallel(
                tp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                create_gloo_process_groups=False,
            )
            place = ActorLayout(stage * tp, tp * pp, 0, tp, stage, pp, 0, 1, torch.device("cpu"))
            chunks = build_model(shape, config, place)
        found = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        shutdown()
        assert stage_parameters(shape, Layout(tp=tp, pp=pp, vpp=vpp), stage) == found


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
def test_gradients_and_optimizer_equal_those_of_an_actor(folder, dtype, width):
    config = ActorConfig(dtype=dtype)
    actor = MegatronActor(str(folder), config, OptimizerConfig(), init_parallel(config), 1.0, 1)
    layout = Layout(weight_bytes=width, distributed_optimizer=False)
    parameters = stage_parameters(actor.shape, layout, 0)
    (chunk,) = actor.ddp
    buffers = sum(buffer.grad_data.nbytes for buffer in chunk.buffers)
    assert gradient_bytes(parameters) == buffers
    optimizer = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])[0].optimizer
    _make_moments(optimizer)
    held = sum(t.nbytes for state in optimizer.state.values() for name, t in state.items() if name != "step")
    if width == 2:
        held += sum(parameter.nbytes for group in optimizer.param_groups for parameter in group["params"])
    assert optimizer_bytes(parameters, layout) == held
    assert num_bytes(actor) == held + parameters * width


def measured_activations(folder, config, layout):
    """Bytes that one layer saves for its backward pass, as the difference between two layers and one."""
    lengths = (40, 30, 26) if layout.cp_size == 1 else (40, 32, 24)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    own = own_positions(cu, layout.cp_rank, layout.cp_size)
    row = pack_row(cu, positions, torch.device("cpu"), None, DTYPES[config.dtype], layout.cp_rank, layout.cp_size)
    saved = []
    for num_layers in (1, 2):
        shape = read_shape(folder)
        object.__setattr__(shape, "num_layers", num_layers)
        with cpu_device.as_cpu():
            (model,) = build_model(shape, config, layout)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
            weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            seen, held = {}, []

            def keep(tensor, weights=weights, seen=seen, held=held):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    seen[storage.data_ptr()] = storage.nbytes()
                    held.append(tensor)  # or its address would be used again
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model(
                    input_ids=torch.randint(0, 12, (1, len(own))),
                    position_ids=positions[own][None],
                    attention_mask=None,
                    packed_seq_params=row,
                )
        saved.append(sum(seen.values()))
    return saved[1] - saved[0]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
def test_activations_are_within_a_tenth_of_what_a_layer_saves(folder, dtype, width, recompute):
    measured = measured_activations(folder, ActorConfig(dtype=dtype, recompute=recompute), one_rank())
    # Three samples of 40, 30 and 26 tokens lie in one rectangle of 3 x 40.
    predicted = layer_activation_bytes(
        read_shape(folder), Layout(weight_bytes=width, recompute=recompute), 96, padding=120 / 96
    )
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_parallel_rank_saves_its_share_and_the_keys_that_it_reads(folder, dtype, width, rank, recompute):
    # What is gathered here is nonsense, but as large as it would be.
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    cpu_device.install()
    config = ActorConfig(dtype=dtype, recompute=recompute, context_parallel_size=2)
    with cpu_device.as_cpu():
        parallel_state.initialize_model_parallel(context_parallel_size=2, create_gloo_process_groups=False)
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    place = ActorLayout(rank, 2, 0, 1, 0, 1, 0, 1, torch.device("cpu"), rank, 2)
    measured = measured_activations(folder, config, place)
    predicted = layer_activation_bytes(
        read_shape(folder), Layout(weight_bytes=width, recompute=recompute, cp=2), 96, padding=120 / 96
    )
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "name, count",
    [
        ("Qwen2.5-Math-1.5B", 1_543_714_304),
        ("Qwen2.5-Math-7B", 7_615_616_512),
        ("Qwen2.5-72B", 72_706_203_648),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.1-70B", 70_553_706_496),
    ],
)
def test_known_models_have_the_parameters_that_their_folders_have(name, count):
    assert model_parameters(shape_of(name)) == count


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_fits_and_says_what_is_saved(name):
    plan = best(shape_of(name), 64, Work(), Machine(), Fixed())
    assert plan.free >= 0 and plan.layout.gpus == 64
    assert plan.selected.total < plan.everything.total
    assert plan.selected.update == pytest.approx(0.6 * plan.everything.update, rel=0.15)
    assert plan.selected.rollout == plan.everything.rollout


def test_more_tensor_ranks_more_recompute_and_offload_take_less_memory():
    shape, work, machine = shape_of("Llama-3.1-8B"), Work(), Machine()

    def memory(offload=False, **layout):
        rollouts = Rollouts(sleeps=offload)
        return evaluate(shape, Layout(**{"dp": 8, **layout}), work, machine, rollouts).stages[0].total

    assert memory(tp=2) < memory()
    assert memory(cp=2, dp=4) < memory()
    assert memory(recompute="full") < memory(recompute="selective") < memory()
    assert memory(offload=True) < memory()
    full = step_times(shape, Layout(dp=8, recompute="full"), work, machine, 1, 1.0)
    assert full.update > step_times(shape, Layout(dp=8), work, machine, 1, 1.0).update


def test_a_sleeping_engine_counts_while_answers_are_made():
    shape, layout, work, machine = shape_of("Llama-3.1-8B"), Layout(tp=2, dp=4), Work(), Machine()
    awake, asleep = (evaluate(shape, layout, work, machine, Rollouts(sleeps=sleeps)) for sleeps in (False, True))
    trainer = asleep.stages[0]
    assert awake.stages[0].total - trainer.total == awake.engine == asleep.engine > 0
    kept = trainer.weights + trainer.gradients + trainer.optimizer + trainer.sync
    assert asleep.answering == kept + asleep.engine
    on_host = evaluate(shape, layout, work, machine, Rollouts(sleeps=True, state_to_host=True))
    assert on_host.answering == asleep.answering - trainer.gradients - trainer.optimizer
    apart = evaluate(shape, layout, work, machine, Rollouts(apart=True))
    assert apart.engine == 0 and apart.stages[0].total == trainer.total
    large = evaluate(shape, layout, work, machine, Rollouts(sleeps=True, memory_share=0.75))
    assert large.engine == 60e9 and large.free < 0


def test_fewer_answers_at_once_where_their_cache_would_not_fit():
    long = Work(prompts=6000, answer_tokens=5000, max_tokens=16384)
    plan = best(shape_of("Llama-3.1-70B"), 1024, long, Machine(), Fixed(), Rollouts(sleeps=True))
    assert plan.free >= 0 and plan.answers < long.answers_at_once
    more = evaluate(shape_of("Llama-3.1-70B"), plan.layout, long, Machine(), Rollouts(sleeps=True))
    assert more.engine > plan.engine and more.free < 0


def test_the_command_names_what_binds_and_what_is_short():
    command = ["-m", "d3s_megatron.plan", "--model", "Qwen2.5-72B", "--gpu-memory", "80"]
    done = run_ranks([*command, "--gpus", "64"])
    assert done.returncode == 0, done.stderr
    assert "memory is bound by" in done.stdout and "time is bound by" in done.stdout
    done = run_ranks([*command, "--gpus", "8"])
    assert done.returncode == 2 and "nothing fits 8 GPUs" in done.stderr
