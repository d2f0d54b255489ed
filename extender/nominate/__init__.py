"""Nominations ahead of a pod's scheduling cycle: `nominator` chooses and writes them, `nomination_reservations` sets their capacity aside."""
