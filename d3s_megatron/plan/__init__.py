"""Memory and time of a run before it is paid for: what layout fits, and what binds."""
