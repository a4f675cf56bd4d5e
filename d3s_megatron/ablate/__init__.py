"""Compares algorithms on the same data, starts and rollout budget: runs, tables and curves; see docs/ablation.md."""
