"""Nominations ahead of a pod's turn: `nominator` chooses and writes them, `reservations` sets their capacity aside."""
