"""The Megatron actor: the only room that imports megatron-core."""

import warnings

from d3s_megatron.actor.late_compile import late_compile

with late_compile(), warnings.catch_warnings():
    # megatron-core warns at import about every optional package that is absent; none is needed here.
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
