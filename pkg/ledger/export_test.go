package ledger

// ReservedNodes returns the number of nodes for which the ledger keeps pods that count in their capacity.
func (l *Ledger) ReservedNodes() int { return len(l.reservations.counted.on) }
