"""Parameters: Flax Linen modules around `ops`. Read `layers`, `retention`, then `sable`."""
