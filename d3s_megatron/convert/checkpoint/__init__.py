"""Checkpoints on disk, converted by moving bytes: no model object, no process group, no tensor held whole.

archive.py     one tensor inside a .distcp file: the zip that torch.save puts around its bytes
blocks.py      rows and columns of Hugging Face tensors, and where they lie in which file, for either format
torch_dist.py  read and lay out megatron-core's distributed checkpoints
moves.py       source blocks x target blocks -> byte moves in bounded memory
job.py         run the moves: pre-sized files, workers, a journal to continue from, rename last
jobs.py        import and export as jobs;  compare.py  verify;  describe.py  plan and inspect
"""
