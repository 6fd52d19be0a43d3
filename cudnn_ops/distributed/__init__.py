"""Many GPUs: sharded tensors in torch's own framework."""
