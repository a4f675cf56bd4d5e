"""The Megatron actor: the only room that imports megatron-core."""

import warnings

with warnings.catch_warnings():
    # megatron-core warns at import about every optional package that is absent; none is needed here.
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
