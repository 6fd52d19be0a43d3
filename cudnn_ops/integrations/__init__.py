"""Adapters that put cudnn_ops under other libraries. Each is imported by its own name."""
