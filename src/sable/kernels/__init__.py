"""GPU forms of what is slow, in Pallas (Triton), each beside a slow truth in `ops` or `nets`. Read `gpu`,
then `retention`."""
