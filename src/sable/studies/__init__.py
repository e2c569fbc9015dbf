"""Many runs as one piece of work: `grid` and `benchmark` compare, `tune` and `trials` search, `reproduce`
runs a published row again."""
