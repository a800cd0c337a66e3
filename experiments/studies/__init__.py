"""Named experiments, one file each: `python -m experiments.run +experiment=NAME`."""
