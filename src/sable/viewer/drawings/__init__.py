"""Drawings of the suites. `choose` picks one; each makes the shapes of `viewer.scene`."""
