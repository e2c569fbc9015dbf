"""From runs to conclusions: `read`, `stats`, `analysis`, then `tables`, `figures` and `page`; `ledger` and
`publish` keep what is published."""
