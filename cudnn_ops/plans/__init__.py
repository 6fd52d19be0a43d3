"""Plans: their cache and store, the policy that builds them, warmup, and tuning."""
