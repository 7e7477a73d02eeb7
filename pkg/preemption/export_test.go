package preemption

// Left returns the steps that are left; it is negative if more were spent.
func (b *Budget) Left() int { return b.steps }
