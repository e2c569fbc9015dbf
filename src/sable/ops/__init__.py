"""Pure array mathematics: retention, returns, losses, distributions, and the verbs for trees and shardings
under them."""
