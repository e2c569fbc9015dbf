"""Time passes here: `loop` drives, `update` is what one seed computes, `rollout` and `evaluate` play,
`checkpoint` keeps."""
