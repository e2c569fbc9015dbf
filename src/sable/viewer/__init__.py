"""A trained team at play: `record` plays, `explain` looks inside, `scene` and `drawings` draw, `page` and
`video` write, `show` is `sable watch`."""
