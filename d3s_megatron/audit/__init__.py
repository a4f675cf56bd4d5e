"""What selection did to every batch, kept as files, and the rollouts that let a step run again.

    OUTPUT_DIR/audit/step-000040.parquet                  what step 40 kept, and why not the rest (see writer.py)
    OUTPUT_DIR/rollouts/step-000040.rank-00000.arrow      what that rank sampled, for d3s_megatron.replay

Steps count from 1 in these names, as on the screen; the checkpoint step-000040 is what step 40 left behind.
"""

from d3s_megatron.audit.files import AuditFile, read_audit

__all__ = ["AuditFile", "read_audit"]
