"""Where prompts come from: one file per workload."""
