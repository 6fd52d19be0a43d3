"""Example programs that use cudnn_ops; run them from the repository root with ``python -m``."""
